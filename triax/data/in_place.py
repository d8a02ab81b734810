"""How are tokens read that another tool has prepared, where they lie?

A flat array of tokens (``.npy``, or raw with a stated type), or Megatron's pair of files, is mapped and not copied. It
is read once from end to end, to see that its ids are those of the tokenizer and to find where documents end.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import numpy.typing as npt

from triax.data.content import identify, require_unchanged
from triax.data.megatron import MegatronIndex, read_index
from triax.data.pieces import SourceFile
from triax.data.store import (
    FORMAT_VERSION,
    StoreWriter,
    TokensInPlace,
    TokenStore,
    TornStore,
    cannot_write,
    token_dtype,
    verify_store,
)
from triax.data.tokenizer import Tokenizer
from triax.errors import BadInput
from triax.spec.data import TokenDtype
from triax.spec.value import fingerprint

_BLOCK: Final = 1 << 22
"""Tokens in memory at once."""

_LIKELY: Final = '"uint16"'


@dataclass(frozen=True, slots=True)
class _TokenFile:
    """An array of tokens in a file."""

    place: TokensInPlace
    num_tokens: int
    paths: tuple[Path, ...]
    """All files that say something of it, first the one with the tokens."""
    index: MegatronIndex | None
    """What says where documents end; None: the tokens themselves."""

    def mapped(self) -> npt.NDArray[Any]:
        dtype = np.dtype(self.place.dtype).newbyteorder("<")
        return np.memmap(self.paths[0], dtype, "r", self.place.offset_bytes, (self.num_tokens,))


def store_in_place(
    file: SourceFile, tokenizer: Tokenizer, cache_folder: Path, progress: Callable[[int, int], None] | None = None
) -> TokenStore:
    """Return a store of the tokens in ``file``, of format ``tokens`` or ``megatron``; from the cache if it has it.

    Raises BadInput where the file is not what its format says, or has an id that ``tokenizer`` does not have.
    """
    found = _found(file)
    stamps, hashes = identify(found.paths, cache_folder)
    said = [found.place.dtype, found.place.offset_bytes, file.format, tokenizer.fingerprint, hashes]
    identity = fingerprint({"format_version": FORMAT_VERSION, "in_place": said})
    folder = cache_folder / "tokens" / identity
    with suppress(TornStore):  # or none yet, or one of a file that was moved
        return verify_store(folder)
    tokens = found.mapped()
    blocks = _checked(tokens, tokenizer, found.paths[0], progress)
    try:
        with StoreWriter(folder, token_dtype(tokenizer.vocab_size), found.place) as writer:
            if found.index is None:
                for ends in _flat_ends(blocks, tokenizer.eos_id, found.num_tokens):
                    writer.append_in_place(0, ends)
            else:
                for _ in blocks:
                    pass  # only their ids are to be checked
                for ends in found.index.document_ends():
                    writer.append_in_place(0, ends)
            writer.append_in_place(found.num_tokens, [])
            require_unchanged(found.paths, stamps)
            return writer.publish(identity, tokenizer, tokens.nbytes, hashes[0])
    except OSError as error:
        raise cannot_write(cache_folder, 8 * found.num_tokens, error) from None


def first_tokens(file: SourceFile, count: int) -> npt.NDArray[Any]:
    """Return the first ``count`` tokens of ``file``, or all where there are fewer, as they are; raise BadInput as
    ``store_in_place`` does where the file is not what its format says."""
    return np.array(_found(file).mapped()[:count])


def _found(file: SourceFile) -> _TokenFile:
    return _megatron(file.path) if file.format == "megatron" else _flat(file)


def _checked(
    tokens: npt.NDArray[Any], tokenizer: Tokenizer, path: Path, progress: Callable[[int, int], None] | None
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield each block of ``tokens`` with the number of its first; raise BadInput at an id that is none."""
    for first in range(0, len(tokens), _BLOCK):
        block = np.asarray(tokens[first : first + _BLOCK])
        if block.max() >= tokenizer.vocab_size or block.min() < 0:
            at = int(np.argmax((block >= tokenizer.vocab_size) | (block < 0)))
            raise BadInput(
                f"{path} has id {int(block[at]):,} at token {first + at:,}, and the ids of tokenizer {tokenizer.name} "
                f"end at {tokenizer.vocab_size - 1:,}: give the tokenizer it was made with as data.tokenizer."
            )
        yield first, block
        if progress is not None:
            progress((first + len(block)) * tokens.itemsize, tokens.nbytes)


def _flat_ends(
    blocks: Iterator[tuple[int, npt.NDArray[Any]]], eos_id: int, num_tokens: int
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield behind how many tokens each document ends: behind each ``eos_id``, and at the end of the array."""
    last = 0
    for first, block in blocks:
        ends = np.flatnonzero(block == eos_id) + first + 1
        if len(ends):
            yield ends
            last = int(ends[-1])
    if last < num_tokens:
        yield np.array([num_tokens])


def _megatron(path: Path) -> _TokenFile:
    index = read_index(path)
    tokens_path = path.with_suffix(".bin")
    place = TokensInPlace(path=str(tokens_path.absolute()), dtype=index.dtype, offset_bytes=0)
    return _TokenFile(place, index.num_tokens, (tokens_path, path), index)


def _flat(file: SourceFile) -> _TokenFile:
    path = file.path
    try:
        dtype, offset_bytes, num_tokens = _npy(path) if path.suffix.lower() == ".npy" else _raw(file)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from None
    if not num_tokens:
        raise BadInput(f"{path} holds no tokens.")
    place = TokensInPlace(path=str(path.absolute()), dtype=dtype, offset_bytes=offset_bytes)
    return _TokenFile(place, num_tokens, (path,), None)


def _raw(file: SourceFile) -> tuple[TokenDtype, int, int]:
    """Return type, first byte and number of the tokens of a file that says nothing of itself."""
    if file.token_dtype is None:
        raise BadInput(
            f"{file.path} does not say what its tokens are: give data.token_dtype, such as {_LIKELY} for a vocabulary "
            f"of up to 65,536."
        )
    size, width = file.path.stat().st_size, np.dtype(file.token_dtype).itemsize
    if size % width:
        raise BadInput(
            f"{file.path} has {size:,} bytes, which is no whole number of {file.token_dtype} tokens: it was cut, or "
            f"data.token_dtype is another."
        )
    return file.token_dtype, 0, size // width


def _npy(path: Path) -> tuple[TokenDtype, int, int]:
    """Return type, first byte and number of the tokens of a ``.npy`` file, whose header says them."""
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError) as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise BadInput(f"{path} is no whole .npy array: {reason}.") from None
    known = get_args(TokenDtype)
    dtype = next((name for name in known if array.dtype == np.dtype(name).newbyteorder("<")), None)
    if array.ndim != 1 or dtype is None:
        raise BadInput(
            f"{path} holds {array.dtype} in shape {array.shape}: a flat array of {', '.join(known)} is read."
        )
    return dtype, array.offset, len(array)
