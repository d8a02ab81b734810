"""Is compressed text the text it was, and does an archive that is cut short or damaged say so?"""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from triax.data import archive
from triax.data.pieces import SourceFile
from triax.data.source import read_pieces
from triax.errors import BadInput
from triax.spec.data import Format

LINES = [f"line {number} of a text\n" for number in range(20_000)]
TEXT = "".join(LINES)


def zstd(content: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow", reason="zstd needs the extra data")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue().to_pybytes())


CODECS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd
}  # fmt: skip


def read(path: Path, content: bytes, file_format: Format = "text") -> list[str]:
    """The documents of a file with ``content``."""
    path.write_bytes(content)
    documents, parts = [], []
    for piece in read_pieces(SourceFile(path, file_format)):
        parts.append(piece.text)
        if piece.ends_document:
            documents.append("".join(parts))
            parts = []
    return documents


@pytest.mark.parametrize("ending", CODECS)
def test_compressed_text_is_the_text(tmp_path: Path, ending: str) -> None:
    whole = CODECS[ending](TEXT.encode())
    assert read(tmp_path / f"a.txt{ending}", whole) == [TEXT]
    # Archives put together, as parallel compressors and `cat` make them, are one.
    assert read(tmp_path / f"b.txt{ending.upper()}", whole + whole) == [TEXT * 2]


@pytest.mark.parametrize("ending", CODECS)
def test_compressed_rows_are_the_rows(tmp_path: Path, ending: str) -> None:
    rows = "".join(json.dumps({"text": line}) + "\n" for line in LINES)
    assert read(tmp_path / f"a.jsonl{ending}", CODECS[ending](rows.encode()), "jsonl") == LINES
    table = "id,text\n" + "".join(f'{number},"{line}"\n' for number, line in enumerate(LINES))
    assert read(tmp_path / f"a.csv{ending}", CODECS[ending](table.encode()), "csv") == LINES


@pytest.mark.parametrize("file_format", ["text", "jsonl", "csv"])
@pytest.mark.parametrize("left", [-1, 0.5, 20, 0])
@pytest.mark.parametrize("ending", CODECS)
def test_an_archive_that_is_cut_short_is_refused(tmp_path: Path, ending: str, left: float, file_format: Format) -> None:
    lines = {"text": LINES, "csv": ["text\n", *LINES]}.get(file_format, [json.dumps({"text": x}) + "\n" for x in LINES])
    whole = CODECS[ending]("".join(lines).encode())
    size = int(left * len(whole)) if isinstance(left, float) else left
    with pytest.raises(BadInput, match=r"a\.x\.\w+ is cut short: its \w+ data ends before the end; fetch or write"):
        read(tmp_path / f"a.x{ending}", whole[:size], file_format)


@pytest.mark.parametrize("ending", CODECS)
def test_what_is_no_archive_is_refused(tmp_path: Path, ending: str) -> None:
    with pytest.raises(BadInput, match=r"a\.txt\.\w+ cannot be decompressed as \w+: [^\n]+; fetch or write"):
        read(tmp_path / f"a.txt{ending}", TEXT.encode())


@pytest.mark.parametrize("ending", [".gz", ".xz", ".zst"])
def test_an_archive_under_another_name_is_recognised(tmp_path: Path, ending: str) -> None:
    for name, file_format in (("a.txt", "text"), ("a.jsonl", "jsonl"), ("a.csv", "csv")):
        with pytest.raises(BadInput, match=rf"{name} looks like \w+: give its name the ending \{ending}\."):
            read(tmp_path / name, CODECS[ending](TEXT.encode()), file_format)  # type: ignore[arg-type]


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz"])
def test_a_damaged_archive_is_refused(tmp_path: Path, ending: str) -> None:
    whole = bytearray(CODECS[ending](TEXT.encode()))
    whole[len(whole) // 2] ^= 255
    with pytest.raises(BadInput, match=r"a\.txt\.\w+ (cannot be decompressed as \w+|is cut short)"):
        read(tmp_path / f"a.txt{ending}", bytes(whole))


def test_bytes_that_are_no_text_are_located_in_the_content(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"a\.txt\.gz is not UTF-8 at byte 300,000: "):
        read(tmp_path / "a.txt.gz", gzip.compress(b"x" * 300_000 + b"\xff"))
    with pytest.raises(BadInput, match=r"a\.jsonl\.gz is not UTF-8 at byte 27, in line 2: "):
        read(tmp_path / "a.jsonl.gz", gzip.compress(b'{"text": "fine"}\n{"text": "\xff"}\n'), "jsonl")


def test_progress_is_of_the_file_and_not_of_its_content(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps({"text": line}) + "\n" for line in LINES).encode()))
    reached = [piece.bytes_read for piece in read_pieces(SourceFile(path, "jsonl"))]
    assert reached == sorted(reached)
    assert reached[-1] == path.stat().st_size


def test_without_pyarrow_the_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "find_spec", lambda name: None)
    for name, file_format in (("a.txt.zst", "text"), ("a.parquet", "parquet"), ("a.arrow", "arrow")):
        with pytest.raises(BadInput, match=rf"{name} needs pyarrow to be read: pip install 'triax\[data\]'"):
            read(tmp_path / name, b"x", file_format)  # type: ignore[arg-type]
    assert read(tmp_path / "a.txt.gz", gzip.compress(b"x")) == ["x"]
