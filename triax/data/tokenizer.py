"""How does text become token ids and back: by bytes, or by any Hugging Face tokenizer.json?"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import tokenizers

from triax.errors import BadInput

TokenIds = npt.NDArray[np.uint32]
"""Token ids of one text (T,)."""

USUAL_EOS_TOKENS: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "<|im_end|>")
"""What ends a document where no file says it: GPT-2 and Qwen, Llama 3, Llama 2, Gemma, DeepSeek, ChatML."""


class Tokenizer(Protocol):
    """What the data room needs from a tokenizer. Ids are in [0, vocab_size)."""

    @property
    def name(self) -> str:
        """What messages and reports call it."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def eos_id(self) -> int:
        """The id that follows every document."""

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give equal ids, wherever their files are."""

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the ids of each text, without anything added before or after."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` without special tokens; what is no character becomes U+FFFD."""


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """Ids 0-255 are the bytes of UTF-8 and 256 ends a document: no vocabulary to train, nothing it cannot encode."""

    name: str = "bytes"
    vocab_size: int = 257
    eos_id: int = 256
    fingerprint: str = "bytes-1"

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text whose bytes are ``ids``; ids that are no byte, ends of documents among them, are left out."""
        return bytes(byte for byte in ids if byte < 256).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A Hugging Face ``tokenizer.json``, run by the tokenizers library on all cores.

    Special tokens that a text spells out are recognised, as the library does by default; none are added. Truncation and
    padding, which some files carry from the task they were made for, are turned off: they would lose or invent tokens.
    """

    def __init__(self, path: Path) -> None:
        """Read ``path`` and, beside it, the name of the token that ends a document.

        Raises BadInput where the file is no tokenizer, or where that token is not said and has none of the usual names.
        """
        content = _read(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise BadInput(f"{path} is not a Hugging Face tokenizer.json: {error}.") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise BadInput(f"{path} has an empty vocabulary.")
        self.name = str(path)
        # Not the number of entries: ids may have gaps.
        self.vocab_size = max(vocabulary.values()) + 1
        self.eos_id = _eos_id(path, vocabulary)
        self.fingerprint = hashlib.sha256(content + f"\neos {self.eos_id}".encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the ids of each text; the texts are spread over the cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def load_tokenizer(said: str) -> Tokenizer:
    """Return the tokenizer that ``data.tokenizer`` says: ``bytes``, a tokenizer.json, or a folder that holds one.

    Raises BadInput where there is none.
    """
    if said == "bytes":
        return ByteTokenizer()
    path = Path(said).expanduser()
    if path.is_dir():
        path /= "tokenizer.json"
    if not path.exists():
        raise BadInput(f'{path} is missing: data.tokenizer is "bytes", a tokenizer.json, or a folder that holds one.')
    return JsonTokenizer(path)


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise BadInput unless every id of ``tokenizer`` is a row of an embedding of ``vocab_size`` rows."""
    if tokenizer.vocab_size > vocab_size:
        raise BadInput(
            f"Tokenizer {tokenizer.name} has ids up to {tokenizer.vocab_size - 1:,}, too large for "
            f"model.vocab_size={vocab_size:,}: set it to {tokenizer.vocab_size:,} or more, or choose another tokenizer."
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from None


def _eos_id(path: Path, vocabulary: dict[str, int]) -> int:
    """Return the id of the token that ends a document: as the files beside ``path`` say, or of the first usual name."""
    config_path = path.with_name("tokenizer_config.json")
    for beside in (config_path, path.with_name("special_tokens_map.json")):
        said = _said_eos(beside)
        if said is not None:
            if said not in vocabulary:
                raise BadInput(f"{beside} says that {said!r} ends a document, and {path.name} has no such token.")
            return vocabulary[said]
    for usual in USUAL_EOS_TOKENS:
        if usual in vocabulary:
            return vocabulary[usual]
    raise BadInput(
        f"{path} has no token that ends a document (looked for {', '.join(USUAL_EOS_TOKENS)}): "
        f'write {{"eos_token": "THE_TOKEN"}} into {config_path}.'
    )


def _said_eos(path: Path) -> str | None:
    """Return the ``eos_token`` of a Hugging Face configuration: a string, or an object with ``content``."""
    if not path.exists():
        return None
    try:
        config: Any = json.loads(_read(path))
    except (ValueError, RecursionError):
        raise BadInput(f"{path} is not JSON.") from None
    said = config.get("eos_token") if isinstance(config, dict) else None
    if isinstance(said, dict):
        said = said.get("content")
    return said if isinstance(said, str) else None
