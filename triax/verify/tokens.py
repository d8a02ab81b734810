"""Which tokens do both sides of a comparison read? The run's own text where it is there, else made-up ones."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from triax.data.corpus import Corpus, corpus_of
from triax.data.files import TOKEN_FORMATS, find_source_files
from triax.data.in_place import first_tokens
from triax.data.source import read_pieces
from triax.data.store import StoreWriter, token_dtype
from triax.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from triax.errors import BadInput
from triax.spec.run import Run

Tokens = npt.NDArray[np.uint32]


def small_corpus(run: Run, case: Run, folder: Path) -> tuple[Corpus, str]:
    """Write as many tokens as ``case``, which is ``run`` shrunk, trains on, in short documents; return them and what
    they are.

    They are the first of the run's text, by its tokenizer, modulo the smaller vocabulary, so that a corpus of any size
    costs the same. Where the corpus or the tokenizer cannot be read they are drawn at random.
    """
    count = (case.train.steps * case.sequences_per_step + 1) * case.data.seq_len + 1
    vocab_size = case.model.vocab_size
    try:
        tokens, what = _first_tokens(run, count) % vocab_size, "of the run's text"
    except BadInput as error:
        tokens = np.random.default_rng(case.train.seed).integers(0, vocab_size, count, dtype=np.uint32)
        what = f"made up, since the run's text cannot be read: {error}"
    if len(tokens) <= case.data.seq_len:
        tokens = np.resize(tokens, case.data.seq_len + 1)
    ends = _document_ends(len(tokens), case.data.seq_len)
    with StoreWriter(folder, token_dtype(vocab_size)) as writer:
        writer.append(tokens, ends)
        name = ByteTokenizer(name="excerpt", vocab_size=vocab_size, eos_id=0)
        return corpus_of(writer.publish("excerpt", name, source_bytes=0)), what


def _first_tokens(run: Run, count: int) -> Tokens:
    """Return the first ``count`` tokens of the run's sources, or all where there are fewer; raise BadInput for none."""
    tokenizer = load_tokenizer(run.data.tokenizer)
    parts: list[Tokens] = []
    for ids in _documents(run, tokenizer, count):
        parts.append(ids)
        if sum(map(len, parts)) >= count:
            break
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint32)
    if not len(tokens):
        raise BadInput("it holds no token.")
    return tokens[:count]


def _documents(run: Run, tokenizer: Tokenizer, most: int) -> Iterator[Tokens]:
    for source in run.data.sources:
        for file in find_source_files(source):
            if file.format in TOKEN_FORMATS:
                yield first_tokens(file, most).astype(np.uint32)
                continue
            assert source.text_field is not None
            for piece in read_pieces(file, source.text_field):
                (ids,) = tokenizer.encode_batch([piece.text])
                yield np.append(ids, np.uint32(tokenizer.eos_id)).astype(np.uint32)


def _document_ends(count: int, seq_len: int) -> list[int]:
    """Return where documents of uneven lengths end, from half a sequence to one and a half."""
    ends, end, number = [], 0, 0
    while end < count:
        end = min(end + seq_len // 2 + 1 + 7 * number % seq_len, count)
        ends.append(end)
        number += 1
    return ends
