"""In which pieces does the text of a file come, so that memory stays bounded whatever its size?

A corpus is a list of files in a fixed order. A file is read in *spans*, stretches of some MiB that can be read without
what lies before them, and a span in *pieces*: a short document is one piece, a long one several. Both are a function of
the file alone. So tokens do not depend on how many processes shared the work, or on where one of them was killed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from triax.spec.data import Format, TokenDtype

PIECE_CHARS: Final = 1 << 18
"""A longer document is cut. Tokenizers hold about 100 bytes per token, so this bounds a piece to a few MiB."""

SPAN_BYTES: Final = 1 << 25
"""About what one process reads at a stretch, and what is done again after a kill."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of documents and how to read it."""

    path: Path
    format: Format
    token_dtype: TokenDtype | None = None
    """Of a raw array of tokens."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a file that can be read on its own."""

    start: int
    stop: int
    """In bytes, row groups or record batches, as the format has them."""
    num_bytes: int
    """Bytes of the file that it stands for; those of all spans sum to the file's size."""
    continues: bool = False
    """It begins inside a document, which the span before it did not end."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A document, or a part of one that is too long to hold at once."""

    text: str
    ends_document: bool
    """False: the next piece goes on with the same document."""
    bytes_read: int
    """Bytes of the span that were read up to here; for progress."""


def pieces_of(text: str, bytes_read: int) -> Iterator[Piece]:
    """Yield the pieces of a document that is in memory already."""
    while len(text) > PIECE_CHARS:
        place = cut(text)
        yield Piece(text[:place], ends_document=False, bytes_read=bytes_read)
        text = text[place:]
    yield Piece(text, ends_document=True, bytes_read=bytes_read)


def cut(text: str) -> int:
    """Return where to cut a piece of at most ``PIECE_CHARS`` off a longer ``text``.

    The tokens of the parts should be the tokens of the whole. Tokenizers first split text into words, and all common
    ones split between the end of a line and a first visible character, and between a word and the space before the
    next; so the cut is made at the last such place, and anywhere only in a text without any. What a tokenizer does at
    the start of a text, such as SentencePiece's mark, it does at the start of each part.
    """
    for mark, after in (("\n", 1), (" ", 0)):
        at = text.rfind(mark, 1, PIECE_CHARS)
        while at > 0:
            place = at + after
            if text[place - 1].isspace() != text[place].isspace():
                return place
            at = text.rfind(mark, 1, at)
    return PIECE_CHARS


def text_fault(value: Any, text_field: str) -> str | None:
    """Return why ``value`` is no text that can be encoded; None where it is one.

    JSON can spell halves of a character, such as ``\\ud800``, that no text encoding can hold.
    """
    if not isinstance(value, str):
        return f"field {text_field!r} holds {kind(value)}, not a string"
    if value.isascii():
        return None
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"holds \\u{ord(value[error.start]):04x}, half of a surrogate pair, which is not text"
    return None


def kind(value: Any) -> str:
    """Return what JSON calls a value, with its article."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object")


def listed(names: Iterable[str], limit: int = 12) -> str:
    """Return ``names`` in quotes as a sentence lists them, the first ``limit`` of them."""
    shown = [repr(name) for name in names]
    return ", ".join(shown[:limit]) + (", ..." if len(shown) > limit else "")


def spans_by_size(sizes: Iterable[int], file_bytes: int) -> list[Span]:
    """Return spans of consecutive parts (row groups, batches) of a file, each of about ``SPAN_BYTES``.

    ``sizes`` are the bytes of each part in memory; they say what share of the file's own bytes a span stands for.
    """
    known = list(sizes)
    total = max(sum(known), 1)
    spans: list[Span] = []
    start = done = told = size = 0
    for part, its_size in enumerate(known, start=1):
        size += its_size
        if size >= SPAN_BYTES or part == len(known):
            done += size
            spans.append(Span(start, part, file_bytes * done // total - told))
            start, told, size = part, file_bytes * done // total, 0
    return spans
