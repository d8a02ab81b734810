"""Does a file read in spans give the documents, and the places for tokenizers to cut, of the file read at once?"""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.test_tokenizer import TEXT, trained
from triax.data import pieces, text
from triax.data.pieces import Piece, SourceFile, spans_by_size
from triax.data.source import read_pieces, read_span, spans_of
from triax.data.tokenizer import load_tokenizer
from triax.errors import BadInput
from triax.spec.data import Format


def joined(found: list[Piece]) -> list[str]:
    """The documents that pieces make up."""
    documents, parts = [], []
    for piece in found:
        parts.append(piece.text)
        if piece.ends_document:
            documents.append("".join(parts))
            parts = []
    assert not parts
    return documents


def in_spans(path: Path, file_format: Format, span_bytes: int, monkeypatch: pytest.MonkeyPatch) -> list[list[Piece]]:
    with monkeypatch.context() as patch:
        patch.setattr(text, "SPAN_BYTES", span_bytes)
        file = SourceFile(path, file_format)
        return [list(read_span(file, "text", span)) for span in spans_of(file)]


@given(st.data(), st.integers(1, 200), st.booleans())
def test_spans_of_any_text_are_the_text(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, span_bytes: int, has_mark: bool
) -> None:
    words = st.sampled_from(["word", " ", "\n", "\n\n", "é", "𝄞", "\u3000", "\r\n", "x" * 40])
    content = "".join(data.draw(st.lists(words, max_size=120)))
    path = tmp_path_factory.mktemp("spans") / "a.txt"
    path.write_bytes(("\ufeff" * has_mark + content).encode())
    with pytest.MonkeyPatch.context() as patch:
        spans = in_spans(path, "text", span_bytes, patch)
    assert joined([piece for span in spans for piece in span]) == [content]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), max_size=25), st.integers(1, 300))
def test_spans_of_any_lines_are_the_lines(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], span_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("spans") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in texts), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        spans = in_spans(path, "jsonl", span_bytes, patch)
    assert joined([piece for span in spans for piece in span]) == texts


@pytest.mark.parametrize(
    ("unit", "starts"),
    [("some words\n    more\n\n", "s"), ("some  words ", " "), ("日本語\n", "日"), ("　全角\n", "　")],
)
def test_spans_begin_where_words_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str, starts: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(unit * 3000)
    spans = in_spans(path, "text", 10_000, monkeypatch)
    assert len(spans) > 2
    assert {span[0].text[0] for span in spans[1:]} == {starts}


def test_a_text_without_words_is_cut_between_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("é𝄞" * 5000)
    spans = in_spans(path, "text", 1001, monkeypatch)
    assert len(spans) > 20
    assert joined([piece for span in spans for piece in span]) == ["é𝄞" * 5000]


def test_tokens_of_spans_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(str(trained(tmp_path)))
    content = (TEXT + "    indented  twice\n\n" + "unbroken" * 9 + " ") * 100
    path = tmp_path / "a.txt"
    path.write_text(content)
    spans = in_spans(path, "text", 1000, monkeypatch)
    assert len(spans) > 10
    ids = tokenizer.encode_batch([piece.text for span in spans for piece in span])
    assert [token for part in ids for token in part.tolist()] == tokenizer.encode_batch([content])[0].tolist()


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [(b'{"text": 1}', r"line 501: field 'text' holds a number"), (b'{"text": "\xff"}', r"byte 9,510, in line 501")],
)
def test_a_broken_line_is_numbered_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bytes, complaint: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "abcdef"}\n' * 500 + broken + b'\n{"text": "a"}' * 500)
    monkeypatch.setattr(text, "SPAN_BYTES", 3000)
    with pytest.raises(BadInput, match=complaint):
        list(read_pieces(SourceFile(path, "jsonl")))


def test_a_broken_byte_is_located_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"word\n" * 1000 + b"\xff" + b"word\n" * 1000)
    monkeypatch.setattr(text, "SPAN_BYTES", 1000)
    with pytest.raises(BadInput, match=r"not UTF-8 at byte 5,000: "):
        list(read_pieces(SourceFile(path, "text")))


@given(st.lists(st.integers(0, 200), max_size=40), st.integers(0, 10**6))
def test_spans_by_size_share_out_parts_and_bytes(sizes: list[int], file_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "SPAN_BYTES", 100)
        spans = spans_by_size(sizes, file_bytes)
    assert [part for span in spans for part in range(span.start, span.stop)] == list(range(len(sizes)))
    assert all(a.stop == b.start for a, b in pairwise(spans))
    assert all(sum(sizes[span.start : span.stop]) >= 100 for span in spans[:-1])
    assert sum(span.num_bytes for span in spans) == (file_bytes if sum(sizes) else 0)
