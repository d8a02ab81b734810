"""How are JSONL and CSV read, and which line is broken? A row is a document, in one of its fields."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from triax.data.archive import OpenFile, opened
from triax.data.pieces import Piece, SourceFile, Span, kind, listed, pieces_of, text_fault
from triax.data.text import bad_encoding
from triax.errors import BadInput

MAX_LINE_BYTES: Final = 1 << 28
"""A longer line is no document but a file without lines."""

_BLOCK_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    """With its end."""
    number: int
    """From 1, in the span."""
    bytes_read: int


def read_jsonl(file: SourceFile, text_field: str, span: Span) -> Iterator[Piece]:
    """Yield the documents of the lines that begin in ``span``; each line that is not blank is an object."""
    path = file.path
    for line in _lines(path, span, "JSONL"):
        if not line.text.isspace():
            yield from pieces_of(_text_of(line, text_field, path, span), line.bytes_read)


def _text_of(line: _Line, text_field: str, path: Path, span: Span) -> str:
    """Return the document of one line of JSONL."""
    try:
        row: Any = json.loads(line.text.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        fault: str | None = f"not JSON ({error.msg} at column {error.colno:,})"
    except (ValueError, RecursionError):  # an integer of thousands of digits, brackets a thousand deep
        fault = "no JSON that can be read: a number is too long or it is nested too deep"
    else:
        fault = _row_fault(row, text_field)
        if fault is None:
            return str(row[text_field])
    raise BadInput(f"{_where(path, span, line.number)}: {fault}.")


def _row_fault(row: Any, text_field: str) -> str | None:
    if not isinstance(row, dict):
        return f'holds {kind(row)}, not an object such as {{"{text_field}": "..."}}'
    if text_field not in row:
        return f"has no field {text_field!r}; its fields are {listed(row) or 'none'}: see data.text_field"
    return text_fault(row[text_field], text_field)


def table_spans(file: SourceFile, text_field: str) -> list[Span]:
    """Return all of a table as one span: a line of it may be the inside of a field."""
    del text_field  # looked for when the table is read
    size = file.path.stat().st_size
    return [Span(0, size, size)]


def read_csv(file: SourceFile, text_field: str, span: Span) -> Iterator[Piece]:
    """Yield the documents of a table whose first row names its columns; commas part them, or tabs in a TSV."""
    path = file.path
    # The limit belongs to the process; a longer field is a quote that nobody closed.
    csv.field_size_limit(MAX_LINE_BYTES)
    lines = _Texts(_lines(path, span, file.format.upper()))
    rows = csv.reader(lines, delimiter="\t" if file.format == "tsv" else ",", strict=True)
    try:
        header = next(rows, [])
        if text_field not in header:
            columns = listed(header) or "none"
            raise BadInput(f"{path} has no column {text_field!r}; its columns are {columns}: see data.text_field.")
        column = header.index(text_field)
        for row in rows:
            if len(row) > column:
                yield from pieces_of(row[column], lines.bytes_read)
            elif row:
                has = f"has {len(row):,} of {len(header):,} fields"
                raise BadInput(f"{path}, line {rows.line_num:,}: {has}, none for {text_field!r}.")
    except csv.Error as error:
        raise BadInput(f"{path}, line {rows.line_num:,}: not {file.format.upper()} ({error}).") from None


class _Texts:
    """The text of lines, for a reader that knows of nothing else."""

    def __init__(self, lines: Iterator[_Line]) -> None:
        self._lines = lines
        self.bytes_read = 0
        """Where the line ends that was given out last."""

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.bytes_read = line.bytes_read
            yield line.text


def _lines(path: Path, span: Span, what: str) -> Iterator[_Line]:
    """Yield the lines that begin in ``span``."""
    with opened(path) as content:
        start, stop = 0, None
        if not content.is_compressed:
            start, stop = _line_start(content, span.start), span.stop
            content.file.seek(start)
        at, number = start, 0
        while stop is None or at < stop:
            line = content.stream.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise BadInput(
                    f"{_where(path, span, number)}: longer than {MAX_LINE_BYTES:,} bytes; {what} has one document per "
                    f"line."
                )
            try:
                text = line.decode("utf-8-sig" if at == 0 else "utf-8")
            except UnicodeDecodeError as error:
                # utf-8-sig counts from behind the mark.
                mark = len(line) - len(error.object)
                raise bad_encoding(path, at + mark + error.start, line, _number(path, span, number)) from None
            at += len(line)
            yield _Line(text, number, content.bytes_read - start if content.is_compressed else at - start)


def _line_start(content: OpenFile, place: int) -> int:
    """Return where the first line starts that does not start before ``place``."""
    if place == 0:
        return 0
    content.file.seek(place - 1)
    while block := content.file.readline(_BLOCK_BYTES):
        if block.endswith(b"\n"):
            break
    return content.file.tell()


def _where(path: Path, span: Span, number: int) -> str:
    return f"{path}, line {_number(path, span, number):,}"


def _number(path: Path, span: Span, number: int) -> int:
    """Return the number of a line in its file; counted only when it is needed."""
    with opened(path) as content:
        if content.is_compressed:
            return number
        left = _line_start(content, span.start)
        content.file.seek(0)
        while left > 0 and (block := content.file.read(min(left, _BLOCK_BYTES))):
            number += block.count(b"\n")
            left -= len(block)
    return number
