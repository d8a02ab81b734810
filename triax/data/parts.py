"""How do several processes tokenise a corpus at once, and how much of it stays done when they are killed?

Each span of each file is tokenised by one process, into *parts*: files with the tokens of some MiB of text, written
under another name, flushed, and renamed. Which text makes up a part depends on the files alone. So whoever comes next,
after a kill or with more processes, finds the parts that are there and makes the others, and the whole is the same.
"""

import os
import secrets
import shutil
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from triax.data.pieces import SourceFile, Span
from triax.data.source import read_span
from triax.data.tokenise import BATCH_CHARS, BATCH_PIECES, DocumentTokens, batches_of_pieces
from triax.data.tokenizer import TokenIds, Tokenizer
from triax.spec.value import fingerprint

PART_CHARS: Final = 1 << 25
"""Text of one part where a span holds more: a compressed file is one span, however long."""

_FORGOTTEN_AFTER_S: Final = 7 * 24 * 3600
"""Parts that nobody went on with for so long are removed when the next corpus is prepared."""


class _Trailer(NamedTuple):
    """The last bytes of a part, which say what is before them."""

    num_tokens: int
    num_documents: int
    crc32: int
    is_last: bool
    """No part of the span comes behind it."""


_TRAILER: Final = struct.Struct("<QQI?")


class TornPart(Exception):
    """A part is not there, or not as it was written; it has been removed, and can be made again."""


@dataclass(frozen=True, slots=True)
class Job:
    """A span to tokenise, and where its parts go."""

    file: SourceFile
    span: Span
    text_field: str
    folder: Path
    number: int
    part_chars: int
    dtype: str
    """Of the tokens, as numpy writes it."""

    def part(self, group: int) -> Path:
        """Return the file of one part."""
        return self.folder / f"{self.number:07}-{group:05}.part"


def plan_jobs(
    spans: Sequence[tuple[SourceFile, Span]], text_field: str, dtype: "np.dtype[Any]", cache_folder: Path, identity: str
) -> list[Job]:
    """Return the jobs that tokenise ``spans``; their folder is named by all that decides what a part holds."""
    cuts = [[span.start, span.stop] for _, span in spans]
    folder = cache_folder / "parts" / fingerprint([identity, cuts, PART_CHARS, BATCH_CHARS, BATCH_PIECES])
    return [
        Job(file, span, text_field, folder, number, PART_CHARS, dtype.str)
        for number, (file, span) in enumerate(spans)
    ]  # fmt: skip


def start_parts(jobs: Sequence[Job]) -> None:
    """Make the folder of the parts, and remove those of other corpora that nobody went on with."""
    folder = jobs[0].folder
    folder.mkdir(parents=True, exist_ok=True)
    for other in folder.parent.iterdir():
        with suppress(OSError):  # it is another user's, or gone
            newest = max(path.stat().st_mtime for path in (other, *other.iterdir()))
            if other != folder and time.time() - newest > _FORGOTTEN_AFTER_S:
                shutil.rmtree(other)


def remove_parts(jobs: Sequence[Job]) -> None:
    """Remove the parts, as nobody needs them any more."""
    shutil.rmtree(jobs[0].folder, ignore_errors=True)


def make_parts(job: Job, tokenizer: Tokenizer) -> Iterator[int]:
    """Make the parts of one job that are not there, and yield the bytes of its file that are done, bit by bit.

    Raises BadInput where the file is broken and OSError where the disk is; parts that are whole stay.
    """
    batches = batches_of_pieces(read_span(job.file, job.text_field, job.span))
    continues, bytes_done = job.span.continues, 0
    for group in count():
        path = job.part(group)
        written = _trailer(path)
        if written is not None and written.is_last:
            break  # nothing behind it has to be read
        documents, chars, is_last = DocumentTokens(tokenizer, continues=continues), 0, True
        with _PartWriter(path, np.dtype(job.dtype)) if written is None else nullcontext() as part:
            for batch in batches:
                if part is not None:
                    part.append(*documents.of(batch))
                chars += batch.num_chars
                continues = not batch.ends_document
                reached = min(batch.bytes_read, job.span.num_bytes)  # the last line may end in the next span
                yield reached - bytes_done
                bytes_done = reached
                if chars >= job.part_chars:
                    is_last = False
                    break
            if part is not None:
                part.publish(is_last)
        if is_last:
            break
    yield job.span.num_bytes - bytes_done


def read_parts(jobs: Sequence[Job]) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]:
    """Yield tokens (T,) and ends of documents of each part, in the order of the corpus; raise TornPart at one."""
    for job in jobs:
        for group in count():
            tokens, ends, is_last = _read(job.part(group), np.dtype(job.dtype))
            yield tokens, ends
            if is_last:
                break


def _trailer(path: Path) -> _Trailer | None:
    """Return what a part says of itself; None where it is not there or cut."""
    with suppress(OSError, struct.error), path.open("rb") as stream:
        stream.seek(-_TRAILER.size, os.SEEK_END)
        return _Trailer(*_TRAILER.unpack(stream.read()))
    return None


def _read(path: Path, dtype: "np.dtype[Any]") -> tuple[npt.NDArray[Any], npt.NDArray[np.int64], bool]:
    trailer = _trailer(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise TornPart(str(path)) from None
    size = 0 if trailer is None else trailer.num_tokens * dtype.itemsize
    body = memoryview(content)[: -_TRAILER.size]
    if trailer is None or len(body) != size + 8 * trailer.num_documents or zlib.crc32(body) != trailer.crc32:
        path.unlink(missing_ok=True)
        raise TornPart(str(path))
    return np.frombuffer(body[:size], dtype), np.frombuffer(body[size:], "<i8"), trailer.is_last


class _PartWriter:
    """A part under way. Leaving the context without ``publish`` removes it."""

    def __init__(self, path: Path, dtype: "np.dtype[Any]") -> None:
        self._path = path
        self._dtype = dtype
        self._temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
        self._stream = self._temporary.open("xb")
        self._crc32 = 0
        self._num_tokens = 0
        self._ends: list[npt.NDArray[np.int64]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a full disk may refuse the last bytes, which nobody wants any more
            self._stream.close()
        self._temporary.unlink(missing_ok=True)

    def append(self, tokens: TokenIds, document_ends: Sequence[int]) -> None:
        """Write ``tokens``; a document ends before each offset of ``document_ends``."""
        self._ends.append(np.asarray(document_ends, dtype="<i8") + self._num_tokens)
        self._num_tokens += len(tokens)
        self._write(tokens.astype(self._dtype))

    def publish(self, is_last: bool) -> None:
        """Bring the part to disk and give it its name."""
        ends = np.concatenate((np.empty(0, dtype="<i8"), *self._ends))
        self._write(ends)
        self._stream.write(_TRAILER.pack(self._num_tokens, len(ends), self._crc32, is_last))
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._temporary.rename(self._path)

    def _write(self, array: npt.NDArray[Any]) -> None:
        content = array.view(np.uint8).data
        self._stream.write(content)
        self._crc32 = zlib.crc32(content, self._crc32)
