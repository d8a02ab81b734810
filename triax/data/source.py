"""Which documents does a corpus hold, in which order, and where exactly is it broken?

A corpus is a list of files in a fixed order. Reading one yields *pieces*: a short document is one piece, a long one
several, so that memory stays bounded whatever the size of a document. A text file is one document, and so is a line of
JSONL. A format is a function from a file to its pieces; another format is one more function and one more row of
``_READERS``.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from triax.errors import BadInput

Format = Literal["text", "jsonl"]

PIECE_CHARS: Final = 1 << 18
"""A longer document is cut. Tokenizers hold about 100 bytes per token, so this bounds a piece to a few MiB."""

MAX_LINE_BYTES: Final = 1 << 28
"""A longer line is no document but a file that is not JSONL."""

_BLOCK_BYTES: Final = 1 << 18
_UTF16_MARKS: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of documents and how to read it."""

    path: Path
    format: Format


@dataclass(frozen=True, slots=True)
class Piece:
    """A document, or a part of one that is too long to hold at once."""

    text: str
    ends_document: bool
    """False: the next piece goes on with the same document."""
    bytes_read: int
    """Bytes of the file that were read up to here; for progress."""


def read_pieces(file: SourceFile, text_field: str = "text") -> Iterator[Piece]:
    """Yield the documents of ``file`` in order, in pieces of at most ``PIECE_CHARS``; a document may be empty.

    Raises BadInput with the byte offset of bytes that are not UTF-8, or with the line number of a line that is not a
    JSON object with ``text_field``.
    """
    try:
        yield from _READERS[file.format](file.path, text_field)
    except OSError as error:
        raise BadInput(f"{file.path} cannot be read: {error.strerror or error}.") from None


def _read_text(path: Path, text_field: str) -> Iterator[Piece]:
    """A whole file is one document; a leading byte order mark is not part of it."""
    del text_field  # a text file has no fields
    pending, bytes_read = "", 0
    for text, bytes_read in _decoded(path):
        pending += text
        while len(pending) > PIECE_CHARS:
            cut = _cut(pending)
            yield Piece(pending[:cut], ends_document=False, bytes_read=bytes_read)
            pending = pending[cut:]
    yield Piece(pending, ends_document=True, bytes_read=bytes_read)


def _decoded(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the text of a file block by block, with the bytes read so far."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    bytes_read = 0
    with path.open("rb") as stream:
        is_last = False
        while not is_last:
            block = stream.read(_BLOCK_BYTES)
            is_last = not block
            undecoded = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=is_last)
            except UnicodeDecodeError as error:
                raise _bad_encoding(path, bytes_read - undecoded + error.start, block) from None
            if bytes_read == 0:
                text = text.removeprefix("\ufeff")
            bytes_read += len(block)
            yield text, bytes_read


def _bad_encoding(path: Path, offset: int, block: bytes, line: int | None = None) -> BadInput:
    where = f"at byte {offset:,}" if line is None else f"at byte {offset:,}, in line {line:,}"
    is_utf16 = offset == 0 and block.startswith(_UTF16_MARKS)
    encoding = "UTF-16" if is_utf16 else "ITS_ENCODING"
    seems = "looks like UTF-16" if is_utf16 else "is not UTF-8"
    return BadInput(f"{path} {seems} {where}: convert it, for example with `iconv -f {encoding} -t UTF-8`.")


def _cut(text: str) -> int:
    """Return where to cut a piece of at most ``PIECE_CHARS`` off a longer ``text``.

    The tokens of the parts should be the tokens of the whole. Tokenizers first split text into words, and all common
    ones split between the end of a line and a first visible character, and between a word and the space before the
    next; so the cut is made at the last such place, and anywhere only in a text without any. What a tokenizer does at
    the start of a text, such as SentencePiece's mark, it does at the start of each part.
    """
    for mark, after in (("\n", 1), (" ", 0)):
        at = text.rfind(mark, 1, PIECE_CHARS)
        while at > 0:
            cut = at + after
            if text[cut - 1].isspace() != text[cut].isspace():
                return cut
            at = text.rfind(mark, 1, at)
    return PIECE_CHARS


def _read_jsonl(path: Path, text_field: str) -> Iterator[Piece]:
    """Each line that is not blank is an object whose ``text_field`` is a document."""
    line_start = 0
    with path.open("rb") as stream:
        number = 0
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise BadInput(
                    f"{path}, line {number:,}: longer than {MAX_LINE_BYTES:,} bytes; JSONL has one document per line."
                )
            try:
                content = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                # utf-8-sig counts from behind the mark.
                mark = len(line) - len(error.object)
                raise _bad_encoding(path, line_start + mark + error.start, line, number) from None
            line_start += len(line)
            if not content.isspace():
                text = _text_of(content.rstrip("\r\n"), text_field, f"{path}, line {number:,}")
                yield from _whole(text, line_start)


def _whole(text: str, bytes_read: int) -> Iterator[Piece]:
    """Yield the pieces of a document that is in memory already."""
    while len(text) > PIECE_CHARS:
        cut = _cut(text)
        yield Piece(text[:cut], ends_document=False, bytes_read=bytes_read)
        text = text[cut:]
    yield Piece(text, ends_document=True, bytes_read=bytes_read)


def _text_of(line: str, text_field: str, where: str) -> str:
    """Return the document of one line of JSONL; ``where`` begins the sentence that says why there is none."""
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(f"{where}: not JSON ({error.msg} at column {error.colno:,}).") from None
    except (ValueError, RecursionError):  # an integer of thousands of digits, brackets a thousand deep
        raise BadInput(f"{where}: no JSON that can be read: a number is too long or it is nested too deep.") from None
    if not isinstance(row, dict):
        raise BadInput(f'{where}: holds {_kind(row)}, not an object such as {{"{text_field}": "..."}}.')
    if text_field not in row:
        present = _listed(row) or "none"
        raise BadInput(f"{where}: has no field {text_field!r}; its fields are {present}: see data.text_field.")
    text = row[text_field]
    if not isinstance(text, str):
        raise BadInput(f"{where}: field {text_field!r} holds {_kind(text)}, not a string.")
    if not text.isascii():
        _refuse_surrogates(text, where)
    return text


def _refuse_surrogates(text: str, where: str) -> None:
    """JSON can spell halves of a character, such as ``\\ud800``, that no text encoding can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise BadInput(f"{where}: holds {half}, half of a surrogate pair, which is not text.") from None


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object")


def _listed(names: Iterable[str], limit: int = 12) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown[:limit]) + (", ..." if len(shown) > limit else "")


_READERS: Final[dict[Format, Callable[[Path, str], Iterator[Piece]]]] = {"text": _read_text, "jsonl": _read_jsonl}
