"""How do Megatron's token files lie on disk, byte by byte, for reading and for writing?

Tokens stand one after another in ``PREFIX.bin``. ``PREFIX.idx`` says where sequences and documents are (as in
``megatron/core/datasets/indexed_dataset.py`` of Megatron-LM): 9 bytes ``MMIDIDX\\0\\0``, version 1 as ``<Q``, the type
of a token as ``<B``, how many sequences and how many entries of the list of documents there are, as ``<Q`` each. Then
come the sequences' lengths (int32), where in the .bin each starts in bytes (int64), and the list of documents (int64):
with which sequence each starts, and the number of all sequences.
"""

import os
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from triax.data.store import TokenStore
from triax.errors import BadInput
from triax.spec.data import TokenDtype

_MAGIC: Final = b"MMIDIDX\x00\x00"
_HEADER: Final = struct.Struct("<9sQBQQ")

_DTYPES: Final[dict[int, TokenDtype]] = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}
_OTHER_DTYPES: Final = {2: "int8", 3: "int16", 6: "float64", 7: "float32"}

_INT32_FROM: Final = 65_500
"""Megatron's own rule: a vocabulary of this size or more has int32 tokens, a smaller one uint16."""

_BLOCK: Final = 1 << 20
"""Entries in memory at once: an index of a large corpus is larger than that."""


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """What an ``.idx`` says, checked: its sequences follow each other and fill the ``.bin``."""

    dtype: TokenDtype
    num_tokens: int
    lengths: npt.NDArray[np.int32]
    """(sequences,): tokens of each"""
    documents: npt.NDArray[np.int64]
    """(documents + 1,): the sequence with which each starts, ascending from 0 to the number of all"""

    def document_ends(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield, some at a time, behind how many tokens each document ends; one without tokens is left out."""
        # A document ends where the sequence before the next one's first ends.
        ends_before, last_end = 0, 0
        place = 1
        for first in range(0, len(self.lengths), _BLOCK):
            ends = ends_before + np.cumsum(self.lengths[first : first + _BLOCK], dtype=np.int64)
            stop = place + int(np.searchsorted(self.documents[place:], first + len(ends), side="right"))
            here = self.documents[place:stop]
            at = ends[here[here > first] - first - 1]
            at = at[np.diff(at, prepend=last_end) > 0]
            if len(at):
                yield at
                last_end = int(at[-1])
            ends_before, place = int(ends[-1]), stop


def read_index(path: Path) -> MegatronIndex:
    """Return what the ``.idx`` at ``path`` says of the ``.bin`` beside it.

    Raises BadInput where it is no such file, was cut, is larger than it can be, or contradicts itself or the ``.bin``.
    Costs one pass over the index; the tokens are not looked at.
    """
    tokens_path = path.with_suffix(".bin")
    try:
        size, tokens_size = path.stat().st_size, tokens_path.stat().st_size
        with path.open("rb") as stream:
            header = stream.read(_HEADER.size)
    except OSError as error:
        raise BadInput(
            f"{error.filename} cannot be read: {error.strerror}; Megatron's tokens are a pair of files."
        ) from None
    dtype, num_sequences, num_entries = _read_header(path, header, size)
    lengths = _mapped(path, "<i4", _HEADER.size, num_sequences)
    pointers = _mapped(path, "<i8", _HEADER.size + 4 * num_sequences, num_sequences)
    documents = _mapped(path, "<i8", _HEADER.size + 12 * num_sequences, num_entries)
    num_tokens = _check_sequences(path, lengths, pointers, np.dtype(dtype).itemsize)
    if not num_tokens:
        raise BadInput(f"{path} lists no tokens: the corpus is empty.")
    expected = num_tokens * np.dtype(dtype).itemsize
    if tokens_size != expected:
        raise BadInput(
            f"{tokens_path} has {tokens_size:,} bytes, and its .idx lists sequences of {expected:,}: one of the two "
            f"was cut or is of another corpus."
        )
    _check_documents(path, documents, num_sequences)
    return MegatronIndex(dtype, num_tokens, lengths, documents)


def _read_header(path: Path, header: bytes, size: int) -> tuple[TokenDtype, int, int]:
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise BadInput(f"{path} is no index of Megatron's: it does not begin with MMIDIDX.")
    _, version, code, num_sequences, num_entries = _HEADER.unpack(header)
    if version != 1:
        raise BadInput(f"{path} is an index of version {version:,}, and 1 is the only one there is: it is damaged.")
    if code not in _DTYPES:
        what = f"{_OTHER_DTYPES[code]} tokens" if code in _OTHER_DTYPES else f"tokens of the unknown type {code}"
        raise BadInput(f"{path} says its corpus has {what}; {', '.join(_DTYPES.values())} can be read.")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_entries
    if size == expected + num_sequences and num_sequences:
        raise BadInput(f"{path} is the index of a multimodal corpus: only those of text can be read.")
    if size != expected:
        raise BadInput(
            f"{path} has {size:,} bytes, and {num_sequences:,} sequences with {num_entries:,} entries of documents "
            f"take {expected:,}: it was cut or is damaged."
        )
    if not num_sequences or num_entries < 2:
        raise BadInput(f"{path} lists no sequence or no document: the corpus is empty.")
    return _DTYPES[code], num_sequences, num_entries


def _mapped(path: Path, dtype: str, offset: int, length: int) -> npt.NDArray[Any]:
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(length,))


def _check_sequences(path: Path, lengths: npt.NDArray[np.int32], pointers: npt.NDArray[np.int64], width: int) -> int:
    """Return the tokens of all sequences; raise BadInput unless each begins where the one before it ends."""
    num_tokens = 0
    for first in range(0, len(lengths), _BLOCK):
        block = lengths[first : first + _BLOCK].astype(np.int64)
        if (block < 0).any():
            at = first + int(np.argmax(block < 0))
            raise BadInput(f"{path}: sequence {at:,} has {int(lengths[at]):,} tokens: the index is damaged.")
        ends = num_tokens + np.cumsum(block)
        expected = (ends - block) * width
        wrong = pointers[first : first + _BLOCK] != expected
        if wrong.any():
            index = int(np.argmax(wrong))
            raise BadInput(
                f"{path}: sequence {first + index:,} begins at byte {int(pointers[first + index]):,}, and those before "
                f"it end at byte {int(expected[index]):,}: offsets that overlap or leave gaps are not Megatron's."
            )
        num_tokens = int(ends[-1])
    return num_tokens


def _check_documents(path: Path, documents: npt.NDArray[np.int64], num_sequences: int) -> None:
    first, last, falls = int(documents[0]), int(documents[-1]), False
    for start in range(0, len(documents), _BLOCK):
        falls = falls or bool((np.diff(documents[start : start + _BLOCK + 1]) < 0).any())
    if first or last != num_sequences or falls:
        raise BadInput(
            f"{path}: its documents do not run from sequence 0 to {num_sequences:,} in order: it is damaged."
        )


def write_megatron(store: TokenStore, prefix: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Write the tokens of ``store`` as ``PREFIX.bin`` and ``PREFIX.idx``, each document one sequence.

    The bytes are those that Megatron's own preprocessing writes of the same tokens. Raises BadInput where one of the
    files exists or cannot be written, or where a document has more tokens than an index can say; then nothing is left.
    """
    paths = [prefix.with_name(prefix.name + ending) for ending in (".bin", ".idx")]
    for path in paths:
        if path.exists():
            raise BadInput(f"{path} exists already: give another prefix, or remove it.")
    starts = store.document_starts
    longest = max(int(np.diff(starts[first : first + _BLOCK + 1]).max()) for first in range(0, len(starts) - 1, _BLOCK))
    if longest >= 1 << 31:
        raise BadInput(f"A document has {longest:,} tokens, and Megatron's index counts less than 2^31 in one.")
    code = 4 if store.index.vocab_size >= _INT32_FROM else 8
    ours = [path.with_name(f".{path.name}-{secrets.token_hex(8)}") for path in paths]
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with ours[0].open("xb") as out:
            _write_tokens(out, store, np.dtype(_DTYPES[code]), progress)
            _flush(out)
        with ours[1].open("xb") as out:
            _write_index(out, store, code)
            _flush(out)
        for temporary, path in zip(ours, paths, strict=True):
            temporary.rename(path)
    except OSError as error:
        raise BadInput(f"{prefix}.bin and .idx cannot be written: {error.strerror or error}.") from None
    finally:
        for temporary in ours:
            with suppress(OSError):
                temporary.unlink()


def _write_tokens(
    out: IO[bytes], store: TokenStore, dtype: "np.dtype[Any]", progress: Callable[[int, int], None] | None
) -> None:
    for first in range(0, store.index.num_tokens, _BLOCK):
        out.write(store.tokens[first : first + _BLOCK].astype(dtype.newbyteorder("<")).data)
        if progress is not None:
            progress(min(first + _BLOCK, store.index.num_tokens), store.index.num_tokens)


def _write_index(out: IO[bytes], store: TokenStore, code: int) -> None:
    num_documents, starts = store.index.num_documents, store.document_starts
    width = np.dtype(_DTYPES[code]).itemsize
    out.write(_HEADER.pack(_MAGIC, 1, code, num_documents, num_documents + 1))
    blocks = [range(first, min(first + _BLOCK, num_documents)) for first in range(0, num_documents, _BLOCK)]
    _write_blocks(out, "<i4", (np.diff(starts[block.start : block.stop + 1]) for block in blocks))
    _write_blocks(out, "<i8", (starts[block.start : block.stop] * width for block in blocks))
    _write_blocks(out, "<i8", (np.arange(block.start, block.stop) for block in blocks))
    _write_blocks(out, "<i8", [np.array([num_documents])])


def _write_blocks(out: IO[bytes], dtype: str, blocks: Iterable[npt.NDArray[np.int64]]) -> None:
    for block in blocks:
        out.write(block.astype(dtype).data)


def _flush(out: IO[bytes]) -> None:
    out.flush()
    os.fsync(out.fileno())
