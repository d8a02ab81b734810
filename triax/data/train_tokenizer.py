"""How does a tokenizer come from text? A byte-level BPE, trained by the tokenizers library.

Byte-level BPE (Sennrich, Haddow and Birch 2016, arXiv:1508.07909; on bytes: Radford et al. 2019, GPT-2) encodes any
text and gives it back unchanged.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from triax.data.pieces import SourceFile
from triax.data.source import read_pieces
from triax.data.tokenizer import JsonTokenizer
from triax.errors import BadInput

_BYTES: Final = 256


def train_tokenizer(
    files: Sequence[SourceFile],
    folder: Path,
    *,
    vocab_size: int,
    eos_token: str = "<|endoftext|>",
    text_field: str = "text",
    progress: Callable[[int, int], None] | None = None,
) -> JsonTokenizer:
    """Train on all text of ``files`` and write ``tokenizer.json`` and ``tokenizer_config.json`` into a new ``folder``.

    The vocabulary has ``vocab_size`` entries, or fewer where the text has no more pairs to merge: ``eos_token`` first,
    then the 256 bytes. Equal text gives equal files. Text streams through; words and their counts are kept. Raises
    BadInput for a folder that is not empty or cannot be written, a vocabulary too small for the bytes, and files that
    are broken or hold no text; then nothing is written.
    """
    if vocab_size <= _BYTES:
        raise BadInput(f"vocab_size={vocab_size:,} has no room for the 256 bytes and {eos_token!r}: use 257 or more.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} exists already and is not empty: give another folder.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[eos_token], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    texts = _Texts(files, text_field, progress)
    tokenizer.train_from_iterator(iter(texts), trainer)
    if not texts.num_chars:
        raise BadInput("The files hold no text to train on.")
    _write(folder, tokenizer, eos_token)
    return JsonTokenizer(folder / "tokenizer.json")


class _Texts:
    """The text of files, piece by piece."""

    def __init__(
        self, files: Sequence[SourceFile], text_field: str, progress: Callable[[int, int], None] | None
    ) -> None:
        self._files = files
        self._text_field = text_field
        self._progress = progress
        self.num_chars = 0

    def __iter__(self) -> Iterator[str]:
        sizes = [file.path.stat().st_size for file in self._files]
        for number, file in enumerate(self._files):
            for piece in read_pieces(file, self._text_field):
                self.num_chars += len(piece.text)
                yield piece.text
                if self._progress is not None:
                    self._progress(sum(sizes[:number]) + piece.bytes_read, sum(sizes))


def _write(folder: Path, tokenizer: Tokenizer, eos_token: str) -> None:
    """Write both files into a folder of another name, and rename it."""
    temporary = folder.with_name(f".{folder.name}-{secrets.token_hex(8)}")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos_token,
        "clean_up_tokenization_spaces": False,
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        (temporary / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        (temporary / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        os.rename(temporary, folder)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
