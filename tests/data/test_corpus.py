"""Does a run read the sources that its data section says, in their proportions, whatever form they have?"""

import gzip
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.corpora import text_store
from triax.data.batch import Batches, batches_of
from triax.data.corpus import Corpus, Source, corpus_of, open_corpus, prepare_corpus
from triax.data.megatron import write_megatron
from triax.data.order import sample_hash
from triax.data.store import TornStore
from triax.data.tokenizer import ByteTokenizer
from triax.errors import BadInput
from triax.spec.data import DataSpec

SEQ_LEN = 8
TEXT = "The quick brown fox jumps over the lazy dog. " * 20


def prepared(folder: Path, *sources: dict[str, Any], **data: Any) -> Corpus:
    said = {"seq_len": SEQ_LEN, "source": sources} if sources else {"seq_len": SEQ_LEN}
    return prepare_corpus(DataSpec.model_validate({**said, **data}), ByteTokenizer(), folder / "cache")


def source(path: Path, weight: float, **said: Any) -> dict[str, Any]:
    return {"train": [str(path)], "weight": weight, **said}


def batches(corpus: Corpus, eval_sequences: int = 4, seed: int = 3) -> Batches:
    return batches_of(corpus, seq_len=SEQ_LEN, attend_across_documents=False, eval_sequences=eval_sequences, seed=seed)


@pytest.fixture
def four(tmp_path: Path) -> Corpus:
    """A text, compressed rows in two files, Megatron's pair, and an array of tokens."""
    (tmp_path / "web.txt").write_text(TEXT)
    for number in range(2):
        rows = "".join(json.dumps({"body": f"row {row} of {number}"}) + "\n" for row in range(40))
        (tmp_path / f"rows{number}.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    write_megatron(text_store(tmp_path, ["megatron " * 30, "tokens " * 20]), tmp_path / "meg")
    np.save(tmp_path / "flat.npy", np.frombuffer((TEXT * 2).upper().encode(), dtype=np.uint8))
    return prepared(
        tmp_path,
        source(tmp_path / "web.txt", 0.4, name="web"),
        source(tmp_path / "rows*.gz", 0.3, text_field="body"),
        source(tmp_path / "meg", 0.2, name="meg"),
        source(tmp_path / "flat.npy", 0.1, name="flat"),
    )


def test_sources_of_every_kind_are_mixed(four: Corpus) -> None:
    assert [one.name for one in four.sources] == ["web", "source-2", "meg", "flat"]
    assert [one.weight for one in four.sources] == [Fraction(part, 10) for part in (4, 3, 2, 1)]
    assert four.num_tokens == sum(one.num_tokens for one in four.sources)
    assert four.num_documents == 1 + 80 + 2 + 1
    mixed = batches(four)
    step = mixed.microbatch(0, 0, 0, 1, 100, 1)
    found = [mixed.source_of(sequence).name for sequence in step.sequences.tolist()]
    assert [found.count(one.name) for one in four.sources] == [40, 30, 20, 10]
    known = {"web": TEXT, "source-2": "row 0123456789of", "meg": "megatron tokens ", "flat": TEXT.upper()}
    for name, tokens in zip(found, step.tokens, strict=True):
        text = ByteTokenizer().decode(tokens.tolist())
        assert set(text) <= set(known[name]), (name, text)


@pytest.mark.parametrize("data_ranks", [1, 2, 4, 8])
def test_order_and_mixture_are_the_same_for_any_number_of_ranks(four: Corpus, data_ranks: int) -> None:
    """And from any sample on: what a resumed run reads is what it would have read."""
    mixed = batches(four)
    for first in (0, 8, 777, 10**9):
        whole = mixed.microbatch(first, 0, 0, 1, 16, 1)
        microbatches = 16 // (2 * data_ranks)
        rows = [
            mixed.microbatch(first, microbatch, rank, data_ranks, 2, microbatches)
            for microbatch in range(microbatches)
            for rank in range(data_ranks)
        ]
        for name in ("tokens", "labels", "positions", "sequences"):
            assert np.array_equal(np.concatenate([getattr(row, name) for row in rows]), getattr(whole, name))
    # One at a time is as all at once.
    alone = [int(mixed.step_samples(sample, 1)[0]) for sample in range(300)]
    assert alone == mixed.step_samples(0, 300).tolist()


def test_other_processes_open_the_same_corpus(four: Corpus, tmp_path: Path) -> None:
    again = open_corpus(four.address)
    assert again.fingerprint == four.fingerprint
    assert [(one.name, one.weight, one.eval_sequences) for one in again.sources] == [
        (one.name, one.weight, one.eval_sequences) for one in four.sources
    ]
    assert batches(again).step_hash(0, 64) == batches(four).step_hash(0, 64)
    (tmp_path / "flat.npy").unlink()
    with pytest.raises(TornStore, match=r"flat\.npy cannot be read"):
        open_corpus(four.address)


def test_one_source_is_what_it_always_was(tmp_path: Path) -> None:
    """The name of the store, the numbers of the sequences and the hash of a step are as without mixtures."""
    (tmp_path / "web.txt").write_text(TEXT)
    alone = prepared(tmp_path, train=[str(tmp_path / "web.txt")])
    (store,) = alone.stores
    assert alone.fingerprint == store.index.fingerprint
    mixed = batches(alone)
    (order,) = mixed.order.orders
    sequences = order.train(np.arange(50))[1]
    assert mixed.step_samples(0, 50).tolist() == sequences.tolist()
    assert mixed.step_hash(0, 50) == sample_hash(sequences, f"{store.index.fingerprint} {SEQ_LEN}")
    said = prepared(tmp_path, source(tmp_path / "web.txt", 5))
    assert said.fingerprint == alone.fingerprint
    assert batches(said).step_hash(0, 50) == mixed.step_hash(0, 50)


def test_held_out_sequences_are_of_all_sources_by_weight(four: Corpus) -> None:
    mixed = batches(four, eval_sequences=10)
    names = [mixed.source_of(sequence).name for sequence in mixed.eval_batch(0, 10).sequences.tolist()]
    assert 1 <= names.count("web") <= 7
    trained = set(mixed.step_samples(0, 5000).tolist())
    assert not trained & set(mixed.eval_batch(0, 10).sequences.tolist())


def test_sources_hold_out_what_they_say(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(TEXT + name)
    sources = [source(tmp_path / "a.txt", 1, eval_sequences=3), source(tmp_path / "b.txt", 1, eval_sequences=1)]
    mixed = batches(prepared(tmp_path, *sources), eval_sequences=4)
    held_out = mixed.eval_batch(0, 6).sequences.tolist()
    assert [mixed.source_of(sequence).name for sequence in held_out[:4]] == ["source-1"] * 3 + ["source-2"]
    assert held_out[4:] == [-1, -1]


def test_epochs_of_sources_are_told(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * (SEQ_LEN * 104))
    (tmp_path / "short.txt").write_text("y" * (SEQ_LEN * 14))
    corpus = prepared(
        tmp_path, source(tmp_path / "long.txt", 1, name="long"), source(tmp_path / "short.txt", 1, name="short")
    )
    mixed = batches(corpus)
    assert mixed.epochs(100) == {"long": 0.5, "short": 5.0}
    assert mixed.describe_epochs(100) == "epochs long 0.50, short 5.00"
    told = [found for first in range(0, 400, 4) if (found := mixed.exhausted(first, first + 4))]
    assert [found["short"] for found in told if "short" in found] == list(range(1, 21))
    assert [found["long"] for found in told if "long" in found] == [1, 2]
    with pytest.raises(IndexError):
        mixed.source_of(len(mixed.sequences))


def test_a_source_too_small_is_named(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(TEXT)
    (tmp_path / "short.txt").write_text("y")
    (tmp_path / "few.txt").write_text("y" * SEQ_LEN * 3)
    sources = source(tmp_path / "long.txt", 1), source(tmp_path / "short.txt", 1, name="short")
    with pytest.raises(BadInput, match=r"Source short has 2 tokens, fewer than one sequence of data\.seq_len=8"):
        batches(prepared(tmp_path, *sources))
    few = prepared(tmp_path, sources[0], source(tmp_path / "few.txt", 1, name="few"))
    assert len(batches(few, eval_sequences=2).sequences) > 3
    with pytest.raises(BadInput, match=r"eval\.sequences=3 leaves none of the 3 sequences of source few .* at most 2"):
        batches(few, eval_sequences=3)
    own = Corpus((few.sources[0], Source("few", few.sources[1].stores, Fraction(1, 2), 3)))
    with pytest.raises(BadInput, match=r"its eval_sequences=3 leaves none of the 3 sequences of source few"):
        batches(own, eval_sequences=3)


def test_several_files_of_tokens_are_one_source(tmp_path: Path) -> None:
    """One after another; no sequence reaches from one into the next, and one too short for a sequence is left out."""
    for number, length in enumerate((20, 3, 17)):
        np.save(tmp_path / f"{number}.npy", np.full(length, number, dtype=np.uint16))
    corpus = prepared(tmp_path, train=[str(tmp_path / "*.npy")])
    assert len(corpus.stores) == 3
    assert corpus.fingerprint == prepared(tmp_path, train=[str(tmp_path / "*.npy")]).fingerprint
    sequences = batches(corpus, 0).sequences
    assert [set(sequences[number].tokens.tolist()) for number in range(len(sequences))] == [{0}, {0}, {2}, {2}]
    with pytest.raises(IndexError):
        sequences[4]


def test_text_and_tokens_are_no_one_source(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    np.save(tmp_path / "b.npy", np.zeros(9, dtype=np.uint16))
    with pytest.raises(BadInput, match=r"b\.npy holds tokens and .*a\.txt text: give each a \[\[data\.source"):
        prepared(tmp_path, train=[str(tmp_path / "a.txt"), str(tmp_path / "b.npy")])


def test_progress_is_of_all_sources(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    (tmp_path / "b.txt").write_text("y" * 300)
    data = DataSpec.model_validate(
        {"seq_len": 8, "source": [source(tmp_path / "a.txt", 1), source(tmp_path / "b.txt", 1)]}
    )
    seen: list[tuple[int, int]] = []
    prepare_corpus(data, ByteTokenizer(), tmp_path / "cache", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(100, 400), (400, 400)]


def test_a_corpus_of_stores(tmp_path: Path) -> None:
    corpus = corpus_of(text_store(tmp_path, ["a" * 30]))
    assert (corpus.num_tokens, corpus.num_documents) == (31, 1)
