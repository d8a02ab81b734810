"""Which documents does a file hold, in which order, and where exactly is it broken?

A format is a row of ``_READERS``: how a file is cut into spans, and how a span is read. Another format is one more row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from triax.data.pieces import Piece, SourceFile, Span
from triax.data.rows import read_csv, read_jsonl, table_spans
from triax.data.tables import arrow_spans, parquet_spans, read_arrow, read_parquet
from triax.data.text import byte_spans, read_text, text_spans
from triax.errors import BadInput
from triax.spec.data import Format


@dataclass(frozen=True, slots=True)
class _Reader:
    spans: Callable[[SourceFile, str], list[Span]]
    read: Callable[[SourceFile, str, Span], Iterator[Piece]]


def spans_of(file: SourceFile, text_field: str = "text") -> list[Span]:
    """Return the spans of ``file``, in order; raise BadInput where it cannot be read or has no ``text_field``."""
    try:
        return _READERS[file.format].spans(file, text_field)
    except OSError as error:
        raise _unreadable(file, error) from None


def read_span(file: SourceFile, text_field: str, span: Span) -> Iterator[Piece]:
    """Yield the pieces of a span; raise BadInput as ``read_pieces`` does."""
    try:
        yield from _READERS[file.format].read(file, text_field, span)
    except OSError as error:
        raise _unreadable(file, error) from None


def read_pieces(file: SourceFile, text_field: str = "text") -> Iterator[Piece]:
    """Yield the documents of ``file`` in order, in pieces of at most ``PIECE_CHARS``; a document may be empty.

    Raises BadInput with the byte offset of bytes that are not UTF-8, with the number of a line or row that does not
    have ``text_field``, or with what else is wrong.
    """
    bytes_before = 0
    for span in spans_of(file, text_field):
        for piece in read_span(file, text_field, span):
            yield replace(piece, bytes_read=bytes_before + piece.bytes_read)
        bytes_before += span.num_bytes


def _unreadable(file: SourceFile, error: OSError) -> BadInput:
    return BadInput(f"{file.path} cannot be read: {error.strerror or error}.")


_TABLE: Final = _Reader(table_spans, read_csv)
_READERS: Final[dict[Format, _Reader]] = {
    "text": _Reader(text_spans, read_text),
    "jsonl": _Reader(byte_spans, read_jsonl),
    "csv": _TABLE,
    "tsv": _TABLE,
    "parquet": _Reader(parquet_spans, read_parquet),
    "arrow": _Reader(arrow_spans, read_arrow),
}
