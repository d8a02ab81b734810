"""Are documents read whole and in order, and does a broken file say where it is broken?"""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.data import rows
from triax.data.pieces import PIECE_CHARS, SourceFile
from triax.data.source import read_pieces
from triax.errors import BadInput
from triax.spec.data import Format


def documents(path: Path, file_format: Format, text_field: str = "text") -> list[str]:
    """The documents of a file, their pieces joined."""
    found, parts = [], []
    for piece in read_pieces(SourceFile(path, file_format), text_field):
        assert len(piece.text) <= PIECE_CHARS
        parts.append(piece.text)
        if piece.ends_document:
            found.append("".join(parts))
            parts = []
    assert not parts, "the last document has no end"
    return found


def written(folder: Path, content: bytes, name: str = "file") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("text", ["", "a", "ä\r\nb\n", "\x00", "𝄞" * 10, "x\ufeffy"])
def test_a_text_file_is_one_document(tmp_path: Path, text: str) -> None:
    assert documents(written(tmp_path, text.encode()), "text") == [text]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert documents(written(tmp_path, "\ufeffhä".encode()), "text") == ["hä"]
    assert documents(written(tmp_path, b'\xef\xbb\xbf{"text": "a"}\n'), "jsonl") == ["a"]


@pytest.mark.parametrize("unit", ["word word\n", "    indented\n\n", "nolines ", "x", "\n", "é𝄞", " \n "])
def test_a_long_document_comes_in_pieces(tmp_path: Path, unit: str) -> None:
    text = unit * (3 * PIECE_CHARS // len(unit) + 7)
    assert documents(written(tmp_path, text.encode()), "text") == [text]
    assert documents(written(tmp_path, json.dumps({"text": text}).encode()), "jsonl") == [text]


@pytest.mark.parametrize(
    ("unit", "ends", "starts"), [("some words\n    more\n\n", "\n", ("s",)), ("some  words ", "ds", (" ",))]
)
def test_pieces_are_cut_where_words_are(tmp_path: Path, unit: str, ends: str, starts: tuple[str, ...]) -> None:
    path = written(tmp_path, (unit * (3 * PIECE_CHARS // len(unit))).encode())
    pieces = list(read_pieces(SourceFile(path, "text")))
    assert len(pieces) > 2
    for before, after in pairwise(pieces):
        assert before.text[-1] in ends
        assert after.text.startswith(starts)


def test_progress_reaches_the_size_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, b"abc def\n" * PIECE_CHARS)
    reached = [piece.bytes_read for piece in read_pieces(SourceFile(path, "text"))]
    assert reached == sorted(reached)
    assert reached[-1] == path.stat().st_size


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=10), st.booleans())
def test_jsonl_gives_its_documents_in_order(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], is_ascii: bool
) -> None:
    lines = [json.dumps({"id": 1, "text": text}, ensure_ascii=is_ascii) for text in texts]
    path = written(tmp_path_factory.mktemp("jsonl"), "\n".join(lines).encode())
    assert documents(path, "jsonl") == texts


def test_blank_lines_of_jsonl_are_skipped(tmp_path: Path) -> None:
    assert documents(written(tmp_path, b'\n{"text": "a"}\r\n  \n{"text": ""}\n\n'), "jsonl") == ["a", ""]


@pytest.mark.parametrize("offset", [0, 5, 1000, 262_142, 262_143, 262_144, 700_001])
@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xe2\x82", b"\xed\xa0\x80", b"\xf0\x9f\x98"])
def test_bytes_that_are_no_text_are_located(tmp_path: Path, offset: int, bad: bytes) -> None:
    """Also where a block ends, and where a character is cut short by the end of the file."""
    for after in (b"", b" and more\n"):
        path = written(tmp_path, b"a" * offset + bad + after)
        with pytest.raises(BadInput, match=rf"file is not UTF-8 at byte {offset:,}: convert it"):
            documents(path, "text")


def test_utf16_is_recognised(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"looks like UTF-16 at byte 0: .*iconv -f UTF-16 -t UTF-8"):
        documents(written(tmp_path, "text".encode("utf-16")), "text")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"text": "a"', r"line 3: not JSON \(Expecting ',' delimiter at column 13\)"),
        (b"{text: 1}", r"line 3: not JSON \("),
        (b"[" * 100_000, "line 3: no JSON that can be read"),
        (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "line 3: no JSON that can be read"),
        (b'"text"', r"line 3: holds a string, not an object"),
        (b"[1]", r"line 3: holds a list, not an object"),
        (b'{"body": "a", "id": 1}', r"line 3: has no field 'text'; its fields are 'body', 'id'"),
        (b"{}", r"line 3: has no field 'text'; its fields are none"),
        (b'{"text": null}', r"line 3: field 'text' holds null, not a string"),
        (b'{"text": 3.5}', r"line 3: field 'text' holds a number, not a string"),
        (b'{"text": ["a"]}', r"line 3: field 'text' holds a list, not a string"),
        (b'{"text": "\\ud800"}', r"line 3: holds \\ud800, half of a surrogate pair"),
        (b'{"text": "\xff"}', r"not UTF-8 at byte 28, in line 3"),
    ],
)
def test_a_corrupt_line_is_numbered(tmp_path: Path, line: bytes, complaint: str) -> None:
    path = written(tmp_path, b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(BadInput, match=complaint) as caught:
        documents(path, "jsonl")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_many_fields_are_listed_in_part(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({f"field{number}": 1 for number in range(50)}).encode())
    with pytest.raises(BadInput, match=r"'field11', \.\.\.: see data\.text_field"):
        documents(path, "jsonl")


def test_another_field_can_hold_the_text(tmp_path: Path) -> None:
    assert documents(written(tmp_path, b'{"body": "a", "text": 1}'), "jsonl", text_field="body") == ["a"]


def test_a_file_without_lines_is_no_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 1000)
    with pytest.raises(BadInput, match=r"line 2: longer than 1,000 bytes"):
        documents(written(tmp_path, b'{"text": "a"}\n' + b"x" * 1001), "jsonl")


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"gone cannot be read: No such file"):
        documents(tmp_path / "gone", "text")
