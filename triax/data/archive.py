"""How is a file read that may be compressed, and what does a user read of an archive that is cut short or damaged?"""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Final, cast

from triax.errors import BadInput

ARCHIVE_NAMES: Final = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
"""The endings of compressed files and what their kind is called."""

ARCHIVE_MARKS: Final = {b"\x1f\x8b": ".gz", b"\xfd7zXZ\0": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
"""What compressed files begin with, where that is no text."""

_BLOCK_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class OpenFile:
    """The content of a file, decompressed where its name says so."""

    stream: IO[bytes]
    file: IO[bytes]
    """The file itself, to seek in, or to ask how far it was read."""
    is_compressed: bool

    @property
    def bytes_read(self) -> int:
        """Bytes of the file, not of its content, that were read."""
        return self.file.tell()


def is_compressed(path: Path) -> bool:
    """Return whether the name of ``path`` says that its content is compressed."""
    return path.suffix.lower() in ARCHIVE_NAMES


def inner_name(path: Path) -> str:
    """Return the name of ``path``, in lower case and without the ending that says how it is compressed."""
    return (path.stem if is_compressed(path) else path.name).lower()


@contextmanager
def opened(path: Path) -> Iterator[OpenFile]:
    """Open ``path`` for reading bytes; raise BadInput where an archive turns out to be cut short, damaged or none."""
    with path.open("rb") as file:
        if not is_compressed(path):
            yield OpenFile(file, file, is_compressed=False)
            return
        name = ARCHIVE_NAMES[path.suffix.lower()]
        if not path.stat().st_size:
            raise BadInput(_cut_short(path, name))
        try:
            with _decompressed(file, path) as stream:
                yield OpenFile(stream, file, is_compressed=True)
        except EOFError:
            raise BadInput(_cut_short(path, name)) from None
        except (zlib.error, lzma.LZMAError) as error:
            raise BadInput(_damaged(path, name, error)) from None
        except OSError as error:
            if error.errno is not None:  # the disk, not the archive
                raise
            is_cut = "Truncated" in str(error)
            raise BadInput(_cut_short(path, name) if is_cut else _damaged(path, name, error)) from None


def _cut_short(path: Path, name: str) -> str:
    return f"{path} is cut short: its {name} data ends before the end; fetch or write it again."


def _damaged(path: Path, name: str, error: Exception) -> str:
    return f"{path} cannot be decompressed as {name}: {str(error).rstrip('.')}; fetch or write it again."


def _decompressed(file: IO[bytes], path: Path) -> IO[bytes]:
    match path.suffix.lower():
        case ".gz":
            return cast(IO[bytes], io.BufferedReader(cast(Any, gzip.GzipFile(fileobj=file)), _BLOCK_BYTES))
        case ".bz2":
            return bz2.BZ2File(file)
        case ".xz":
            return lzma.LZMAFile(file)
    return cast(IO[bytes], io.BufferedReader(_zstd_stream(file, path), _BLOCK_BYTES))


def _zstd_stream(file: IO[bytes], path: Path) -> Any:
    require_pyarrow(path)
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")


def require_pyarrow(path: Path) -> None:
    """Raise BadInput unless pyarrow is installed, which reads ``path``."""
    if find_spec("pyarrow") is None:
        raise BadInput(f"{path} needs pyarrow to be read: pip install 'triax[data]'.")
