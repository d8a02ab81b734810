"""How do bytes reach the disk so that a crash at any moment leaves the old or the new, never a mixture?"""

import errno
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from itertools import takewhile
from pathlib import Path
from typing import Final

from triax.checkpoint import operations
from triax.errors import BadInput, TriaxError
from triax.units import format_bytes

# Bytes between two looks at whether the work is still wanted.
_CHUNK_BYTES: Final = 16 << 20


class Cancelled(Exception):
    """The work is no longer wanted; nothing is wrong with the disk."""


def write_new(path: Path, parts: Iterable[memoryview], is_cancelled: Callable[[], bool]) -> tuple[int, str]:
    """Write a new file to the disk and return its size in bytes and its SHA-256, both taken from memory.

    Raises FileExistsError where there is one already, OSError where the disk fails, Cancelled once it is not wanted.
    """
    digest = hashlib.sha256()
    num_bytes = 0
    with _opened_new(path) as descriptor:
        for part in parts:
            for begin in range(0, len(part), _CHUNK_BYTES):
                if is_cancelled():
                    raise Cancelled
                chunk = part[begin : begin + _CHUNK_BYTES]
                digest.update(chunk)
                num_bytes += len(chunk)
                _write_all(descriptor, chunk)
        operations.sync(descriptor)
    return num_bytes, digest.hexdigest()


def write_unsynced(path: Path, data: bytes) -> None:
    """Write a new small file that a crash may lose. Raises OSError."""
    with _opened_new(path) as descriptor:
        _write_all(descriptor, memoryview(data))


def write_atomically(path: Path, data: bytes) -> None:
    """Make ``path`` hold ``data``, on the disk when this returns; a crash leaves what was there before."""
    temporary = path.with_name(path.name + ".tmp")
    operations.unlink(temporary)
    with _opened_new(temporary) as descriptor:
        _write_all(descriptor, memoryview(data))
        operations.sync(descriptor)
    operations.rename(temporary, path)
    sync_folder(path.parent)


@contextmanager
def _opened_new(path: Path) -> Iterator[int]:
    descriptor = operations.open_new(path)
    try:
        yield descriptor
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[operations.write(descriptor, data) :]


def make_folders(path: Path) -> list[Path]:
    """Make ``path`` with the folders it lies in, and return those that this made, inner ones first; their names are on
    the disk then. Raises OSError, and then nothing was made."""
    missing = list(takewhile(lambda folder: not folder.is_dir(), (path, *path.parents)))
    made: list[Path] = []
    try:
        for folder in reversed(missing):
            try:
                operations.make_folder(folder)
            except FileExistsError:
                if not folder.is_dir():
                    raise
                continue  # another rank was faster
            made.insert(0, folder)
            sync_folder(folder.parent)
    except OSError:
        remove_empty(made)
        raise
    return made


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove those of ``folders`` that hold nothing, inner ones first."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def sync_file(path: Path) -> None:
    """Bring what a file holds to the disk."""
    with path.open("rb") as file:
        operations.sync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk: files created, renamed or removed so far."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        operations.sync(descriptor)
    except OSError as error:
        # Some network file systems have no such operation for folders; they order names themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def read_small(path: Path, max_bytes: int) -> bytes:
    """Return what a file holds. Raises BadInput if it is longer than ``max_bytes`` or no regular file, else OSError."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise BadInput(f"{path} is longer than the {max_bytes} bytes that such a file can have.")
    return data


def open_regular(path: Path) -> BufferedReader:
    """Return a file opened for reading. Raises BadInput if it is no regular file, else OSError."""
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise BadInput(f"{path} is no regular file.")
    return file


def what_is_wrong(path: Path, num_bytes: int, sha256: str) -> str | None:
    """Return None if the file has this size and SHA-256, else what is wrong with it, as the end of a sentence."""
    try:
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return "is no regular file"
            if status.st_size != num_bytes:
                return f"has {status.st_size} bytes instead of {num_bytes}"
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                return "does not have the checksum that it was written with"
    except OSError as error:
        return f"cannot be read: {sentence(error)}"
    return None


def _open_at_once(path: str, flags: int) -> int:
    # A pipe in a file's place would hold up anyone who opens it.
    return os.open(path, flags | os.O_NONBLOCK)


@contextmanager
def new_folder(path: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield a fresh folder that becomes ``path`` when the body of the ``with`` ends well, and is removed otherwise.

    Raises BadInput where something is there already or there is no room, and TriaxError where the disk fails.
    """
    path = path.absolute()
    made: list[Path] = []
    try:
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise BadInput(f"{path} is there already, and nothing is overwritten: name a new folder.")
        made = make_folders(path.parent)
        # First of all, since where nothing can be made there is often no room either, and that would not be the reason.
        fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        remove_empty(made)
        raise BadInput(f"{path} cannot be made: {sentence(error)}; name another folder.") from None
    try:
        if needed_bytes > (free := free_bytes(path.parent)):
            raise BadInput(
                f"disk full: it needs {format_bytes(needed_bytes)} in {path.parent} and {format_bytes(free)} are free."
            )
        yield fresh
        fresh.chmod(0o777 & ~_umask())
        sync_folder(fresh)
        fresh.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise TriaxError(f"{path} could not be written: {sentence(error)}; nothing of it was left.") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # gone already where all went well
        remove_empty(made)


def _umask() -> int:
    """Return the rights that new files do not get; the system tells it only when it is set."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def free_bytes(folder: Path) -> int:
    """Return how many bytes an ordinary user can still write to the file system of ``folder``; no limit where it does
    not tell, as some network mounts do not."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize if status.f_blocks else sys.maxsize


def sentence(error: OSError) -> str:
    """Return what the system said, without number and path: ``no space left on device``."""
    text = error.strerror or str(error) or type(error).__name__
    return text[0].lower() + text[1:]
