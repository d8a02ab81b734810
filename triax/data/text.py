"""How is a plain text file read, of any size, and where is it not UTF-8? The whole file is one document."""

import codecs
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Final

from triax.data.archive import ARCHIVE_MARKS, ARCHIVE_NAMES, is_compressed, opened
from triax.data.pieces import PIECE_CHARS, SPAN_BYTES, Piece, SourceFile, Span, cut
from triax.errors import BadInput

_BLOCK_BYTES: Final = 1 << 18
_LOOK_BYTES: Final = 1 << 20
_CONTINUATIONS: Final = bytes(range(0x80, 0xC0))
"""Bytes that do not begin a character."""

_UTF16_MARKS: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def byte_spans(file: SourceFile, text_field: str) -> list[Span]:
    """Return the spans of a file of text or lines: some MiB each, or all of a compressed file.

    They meet at bytes that count nothing of lines or characters; each format moves them to where it can begin.
    """
    del text_field  # every field of a line is read
    size = file.path.stat().st_size
    count = 1 if is_compressed(file.path) else max(1, size // SPAN_BYTES)
    edges = [size * part // count for part in range(count + 1)]
    return [Span(start, stop, stop - start) for start, stop in pairwise(edges)]


def text_spans(file: SourceFile, text_field: str) -> list[Span]:
    """Return the spans of a file that is one document."""
    return [replace(span, continues=span.start > 0) for span in byte_spans(file, text_field)]


def read_text(file: SourceFile, text_field: str, span: Span) -> Iterator[Piece]:
    """Yield the text of ``span``; a byte order mark at the start of the file is not part of it."""
    del text_field  # a text file has no fields
    ends_file = span.stop == file.path.stat().st_size
    pending, bytes_read = "", 0
    for text, bytes_read in _decoded(file.path, span):
        pending += text
        while len(pending) > PIECE_CHARS:
            place = cut(pending)
            yield Piece(pending[:place], ends_document=False, bytes_read=bytes_read)
            pending = pending[place:]
    yield Piece(pending, ends_document=ends_file, bytes_read=bytes_read)


def _decoded(path: Path, span: Span) -> Iterator[tuple[str, int]]:
    """Yield the text of a span block by block, with the bytes of the file read so far."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with opened(path) as content:
        start, stop = 0, None
        if not content.is_compressed:
            start, stop = _boundary(content.file, span.start), _boundary(content.file, span.stop)
            content.file.seek(start)
        at = start  # of what is decompressed
        is_last = False
        while not is_last:
            block = content.stream.read(_BLOCK_BYTES if stop is None else min(_BLOCK_BYTES, stop - at))
            is_last = not block
            undecoded = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=is_last)
            except UnicodeDecodeError as error:
                raise bad_encoding(path, at - undecoded + error.start, block) from None
            if at == 0:
                text = text.removeprefix("\ufeff")
            at += len(block)
            yield text, content.bytes_read - start


def _boundary(file: IO[bytes], place: int) -> int:
    """Return where, at ``place`` or soon after, a text can be cut without a tokenizer seeing it: see ``cut``.

    Both spans that meet at ``place`` find the same boundary.
    """
    if place == 0:
        return 0
    file.seek(place - 1)
    window = file.read(_LOOK_BYTES)
    if len(window) == 1:  # the end of the file
        return place
    for end in re.finditer(rb"\n(?=\S)", window):
        if _is_visible(window[end.end() : end.end() + 4]):
            return place - 1 + end.end()
    if end_of_word := re.search(rb"[!-~](?= )", window):
        return place - 1 + end_of_word.end()
    # A text without such a place is cut anywhere but inside a character.
    inside = len(window[1:5].lstrip(_CONTINUATIONS))
    return place + len(window[1:5]) - inside


def _is_visible(start: bytes) -> bool:
    """Return whether the text that ``start`` begins does not begin with a space of any kind."""
    character = start.decode("utf-8", errors="ignore")[:1]
    return bool(character) and not character.isspace()


def bad_encoding(path: Path, offset: int, block: bytes, line: int | None = None) -> BadInput:
    """Return what is said of a byte that is not UTF-8; ``block`` starts with the first bytes of the file or line."""
    where = f"at byte {offset:,}" if line is None else f"at byte {offset:,}, in line {line:,}"
    for mark, ending in ARCHIVE_MARKS.items():
        if offset < len(mark) and block.startswith(mark):
            return BadInput(f"{path} looks like {ARCHIVE_NAMES[ending]}: give its name the ending {ending}.")
    is_utf16 = offset == 0 and block.startswith(_UTF16_MARKS)
    encoding = "UTF-16" if is_utf16 else "ITS_ENCODING"
    seems = "looks like UTF-16" if is_utf16 else "is not UTF-8"
    return BadInput(f"{path} {seems} {where}: convert it, for example with `iconv -f {encoding} -t UTF-8`.")
