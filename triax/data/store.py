"""How do the tokens of a corpus lie on disk, and are they whole?

A store is a folder of three files: ``tokens.bin`` has all tokens (little-endian uint16, or uint32 for vocabularies
above 65,536), ``documents.bin`` where each document starts and where the last one ends (little-endian int64), and
``index.json`` says what they are. A store is written in a folder of another name, flushed, and renamed: if it is there,
it is whole, unless the disk or a hand has damaged it since. Tokens that another tool has prepared are not copied: the
store of such a file has no ``tokens.bin``, and its index says where the file is.
"""

import errno
import hashlib
import os
import secrets
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from triax.data.content import hash_files
from triax.data.tokenizer import Tokenizer
from triax.errors import BadInput
from triax.spec.data import TokenDtype
from triax.spec.value import Value
from triax.units import format_bytes

FORMAT_VERSION: Final = 1

TOKENS_FILE: Final = "tokens.bin"
DOCUMENTS_FILE: Final = "documents.bin"
INDEX_FILE: Final = "index.json"

_ABANDONED_AFTER_S: Final = 24 * 3600
"""A store under way is written to every few seconds; untouched for a day, its process was killed."""


class TornStore(BadInput):
    """A folder that should hold a store has none that is whole. Preparing again replaces it."""


class TokensInPlace(Value):
    """Tokens that lie in a file of another tool, one after another and little-endian."""

    path: str
    dtype: TokenDtype
    offset_bytes: int = Field(ge=0)
    """Bytes of the file before the first token."""


class StoreIndex(Value):
    """What ``index.json`` says of the files beside it."""

    format_version: Literal[1] = FORMAT_VERSION
    fingerprint: str
    """Names text, tokenizer and format: equal fingerprints, equal tokens."""
    tokenizer: str
    vocab_size: int = Field(ge=1)
    eos_id: int = Field(ge=0)
    token_bytes: Literal[2, 4]
    num_tokens: int = Field(ge=1)
    num_documents: int = Field(ge=1)
    source_bytes: int = Field(ge=0)
    tokens_sha256: str
    documents_sha256: str
    in_place: TokensInPlace | None = None


@dataclass(frozen=True, slots=True)
class TokenStore:
    """The tokens of a corpus, mapped from disk: a process holds none but those it looks at, and all share one copy."""

    folder: Path
    """Where ``open_store`` finds it, in this process or another."""
    index: StoreIndex
    tokens: npt.NDArray[Any]
    """(num_tokens,) integers in [0, vocab_size)"""
    document_starts: npt.NDArray[np.int64]
    """(num_documents + 1,): ascending from 0 to num_tokens; document i is tokens[starts[i]:starts[i + 1]]"""


def token_dtype(vocab_size: int) -> "np.dtype[Any]":
    """Return the smallest of the two widths that holds every id below ``vocab_size``."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def open_store(folder: Path) -> TokenStore:
    """Return the store in ``folder``; raise TornStore where a file is missing, cut, or not what the index says.

    Costs the same for any size: contents are checked by ``verify_store``.
    """
    try:
        index = StoreIndex.model_validate_json((folder / INDEX_FILE).read_bytes())
    except OSError as error:
        raise TornStore(f"{folder} holds no prepared tokens: {INDEX_FILE}: {error.strerror or error}.") from None
    except ValidationError:
        raise TornStore(f"{folder} holds no prepared tokens of format {FORMAT_VERSION}: see {INDEX_FILE}.") from None
    if index.in_place is None:
        tokens = _map(folder / TOKENS_FILE, np.dtype(f"<u{index.token_bytes}"), index.num_tokens)
    else:
        dtype = np.dtype(index.in_place.dtype).newbyteorder("<")
        tokens = _map(Path(index.in_place.path), dtype, index.num_tokens, index.in_place.offset_bytes)
    starts = _map(folder / DOCUMENTS_FILE, np.dtype("<i8"), index.num_documents + 1)
    if starts[0] != 0 or starts[-1] != index.num_tokens:
        raise TornStore(f"{folder / DOCUMENTS_FILE} does not cover the {index.num_tokens:,} tokens beside it.")
    return TokenStore(folder, index, tokens, starts)


def _map(path: Path, dtype: "np.dtype[Any]", length: int, offset_bytes: int = 0) -> npt.NDArray[Any]:
    expected = offset_bytes + length * dtype.itemsize
    try:
        found = path.stat().st_size
        if found != expected:
            raise TornStore(f"{path} has {found:,} bytes in place of {expected:,}.")
        return np.memmap(path, dtype=dtype, mode="r", offset=offset_bytes, shape=(length,))
    except OSError as error:
        raise TornStore(f"{path} cannot be read: {error.strerror or error}.") from None


def verify_store(folder: Path) -> TokenStore:
    """Return the store in ``folder``; raise TornStore unless every byte is as it was written.

    Reads the files whole when they are new or were touched, and by a memo beside them not again. Tokens that lie in
    place are not read: their checksum is part of the fingerprint by which a store is found.
    """
    index = open_store(folder).index
    written = {folder / TOKENS_FILE: index.tokens_sha256} if index.in_place is None else {}
    written[folder / DOCUMENTS_FILE] = index.documents_sha256
    try:
        hashes = hash_files(list(written), folder / "verified.json")
    except BadInput as error:  # another process is just replacing it
        raise TornStore(str(error)) from None
    for path, found in zip(written, hashes, strict=True):
        if found != written[path]:
            raise TornStore(f"{path} was damaged after it was written: its checksum differs.")
    # Mapped only now: what was mapped before the files were read could be a damaged store that another process has
    # replaced meanwhile. What replaces a store is whole.
    return open_store(folder)


class StoreWriter:
    """A store under way, in a folder beside its final one. Leaving the context without ``publish`` removes it.

    Methods raise OSError where the disk does.
    """

    def __init__(self, folder: Path, dtype: "np.dtype[Any]", in_place: TokensInPlace | None = None) -> None:
        """Start a store that will be published as ``folder``, and remove those that killed processes left there.

        Its tokens will be of ``dtype``, or lie ``in_place``.
        """
        self._folder = folder
        self._dtype = dtype
        self._in_place = in_place
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        self._temporary = _sibling(folder)
        self._temporary.mkdir()
        try:
            self._tokens = _HashedFile(self._temporary / TOKENS_FILE) if in_place is None else None
            self._documents = _HashedFile(self._temporary / DOCUMENTS_FILE)
        except OSError:
            shutil.rmtree(self._temporary, ignore_errors=True)
            raise
        self.num_tokens = 0
        self.num_documents = 0

    def __enter__(self) -> Self:
        self._documents.write(np.zeros(1, dtype="<i8"))
        return self

    def __exit__(self, *_: object) -> None:
        if self._tokens is not None:
            self._tokens.abandon()
        self._documents.abandon()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def append(self, tokens: npt.NDArray[np.unsignedinteger[Any]], document_ends: npt.ArrayLike) -> None:
        """Write ``tokens`` (T,); a document ends before each offset of ``document_ends`` (ascending, in (0, T])."""
        assert self._tokens is not None
        self._tokens.write(tokens.astype(self._dtype))
        self.append_in_place(len(tokens), document_ends)

    def append_in_place(self, num_tokens: int, document_ends: npt.ArrayLike) -> None:
        """Count the next ``num_tokens`` of those in place; documents end among them as in ``append``."""
        ends = np.asarray(document_ends, dtype="<i8")
        self._documents.write(ends + self.num_tokens)
        self.num_tokens += num_tokens
        self.num_documents += len(ends)

    def publish(self, fingerprint: str, tokenizer: Tokenizer, source_bytes: int, tokens_sha256: str = "") -> TokenStore:
        """Make the store visible, whole, and return it; where another process was faster, return its equal store.

        ``tokens_sha256`` is that of a file of tokens in place.
        """
        index = StoreIndex(
            fingerprint=fingerprint,
            tokenizer=tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            token_bytes=4 if self._dtype.itemsize == 4 else 2,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            source_bytes=source_bytes,
            tokens_sha256=tokens_sha256 if self._tokens is None else self._tokens.close(),
            documents_sha256=self._documents.close(),
            in_place=self._in_place,
        )
        index_file = _HashedFile(self._temporary / INDEX_FILE)
        index_file.write(np.frombuffer(index.model_dump_json(indent=1).encode(), dtype=np.uint8))
        index_file.close()
        _sync_folder(self._temporary)
        # Opened under its first name: its files stay mapped, whatever other processes do with the name it gets.
        store = open_store(self._temporary)
        while not _rename(self._temporary, self._folder):
            try:
                return verify_store(self._folder)
            except TornStore:
                _remove(self._folder)
        _sync_folder(self._folder.parent)
        return replace(store, folder=self._folder)


def cannot_write(cache_folder: Path, most_bytes: int, error: OSError, *, keeps_parts: bool = False) -> BadInput:
    """Return why the cache cannot be written, and what would help."""
    message = f"Prepared tokens cannot be written to {cache_folder}: {error.strerror or error}"
    remedy = "set data.cache_dir to another folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        message += f"; up to {format_bytes(most_bytes)} are needed there"
        with suppress(OSError):  # the folder could not even be made
            message += f" and {format_bytes(shutil.disk_usage(cache_folder).free)} are free"
        remedy = f"make room, or {remedy}"
    kept = "; what is finished was kept" if keeps_parts else ""
    return BadInput(f"{message}: {remedy}{kept}.")


class _HashedFile:
    """A new file that knows the checksum of what was written to it."""

    def __init__(self, path: Path) -> None:
        self._stream: IO[bytes] = path.open("xb")
        self._hash = hashlib.sha256()

    def write(self, array: npt.NDArray[Any]) -> None:
        content = array.view(np.uint8).data
        self._stream.write(content)
        self._hash.update(content)

    def close(self) -> str:
        """Bring all to disk and return the SHA-256."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return self._hash.hexdigest()

    def abandon(self) -> None:
        """Close in any case; a full disk may refuse the last bytes, which nobody wants any more."""
        with suppress(OSError):
            self._stream.close()


def _sibling(folder: Path) -> Path:
    """Return a new name beside ``folder``, marked as no store of its own."""
    return folder.with_name(f".{folder.name}-{secrets.token_hex(8)}")


def _rename(folder: Path, name: Path) -> bool:
    """Return whether ``folder`` now has ``name``; it does not where something else has it."""
    try:
        os.rename(folder, name)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            return False
        raise
    return True


def _remove(folder: Path) -> None:
    """Remove a store at once for those who look for it; the files live on for those who have them mapped."""
    aside = _sibling(folder)
    with suppress(FileNotFoundError):  # another process removed it
        os.rename(folder, aside)
        shutil.rmtree(aside) if aside.is_dir() else aside.unlink()


def _remove_abandoned(folder: Path) -> None:
    for left in folder.parent.glob(f".{folder.name}-*"):
        with suppress(OSError):  # it is another user's, or gone
            newest = max(path.stat().st_mtime for path in (left, *left.iterdir()))
            if time.time() - newest > _ABANDONED_AFTER_S:
                shutil.rmtree(left)


def _sync_folder(folder: Path) -> None:
    """Bring the names in ``folder`` to disk: a file can be safe there while its name is not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
