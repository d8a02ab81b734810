"""Are the rows of CSV, Parquet and Arrow read whole and in order, and is a table without its column refused?"""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.data import pieces, rows
from triax.data.files import find_files
from triax.data.pieces import PIECE_CHARS, SourceFile
from triax.data.source import read_pieces, spans_of
from triax.errors import BadInput
from triax.spec.data import Format

TEXTS = ["one", "", 'two\nlines, "quoted"', "ä𝄞", "x" * (PIECE_CHARS + 5), "end"]


def documents(path: Path, file_format: Format, text_field: str = "text") -> list[str]:
    """The documents of a file, their pieces joined."""
    found, parts = [], []
    for piece in read_pieces(SourceFile(path, file_format), text_field):
        parts.append(piece.text)
        if piece.ends_document:
            found.append("".join(parts))
            parts = []
    return found


def csv_bytes(texts: list[str], **options: Any) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, **options)
    writer.writerow(["id", "text", "more"])
    writer.writerows([number, text, "z"] for number, text in enumerate(texts))
    return out.getvalue().encode()


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=30), max_size=10))
def test_csv_gives_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("csv")
    (folder / "a.csv").write_bytes(csv_bytes(texts))
    (folder / "a.tsv").write_bytes(csv_bytes(texts, delimiter="\t"))
    assert documents(folder / "a.csv", "csv") == texts
    assert documents(folder / "a.tsv", "tsv") == texts


def test_long_fields_and_marks_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + csv_bytes(TEXTS) + b"\n\n")
    assert documents(tmp_path / "a.csv", "csv") == TEXTS
    (tmp_path / "b.csv").write_bytes(b"text\nonly\ncolumn\n")
    assert documents(tmp_path / "b.csv", "csv") == ["only", "column"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"id,body\n1,a\n", r"has no column 'text'; its columns are 'id', 'body': see data\.text_field"),
        (b"", r"has no column 'text'; its columns are none"),
        (b"id,text\n1,a\n2\n", r"line 3: has 1 of 2 fields, none for 'text'"),
        (b'id,text\n1,"a\n', r"line 2: not CSV \(unexpected end of data\)"),
        (b'id,text\n1,"a"b\n', r"line 2: not CSV \("),
        (b"id,text\n1,\xff\n", r"is not UTF-8 at byte 10, in line 2"),
    ],
)
def test_a_broken_csv_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(BadInput, match=complaint):
        documents(tmp_path / "a.csv", "csv")


def test_a_quote_that_nobody_closes_ends_somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 1000)
    (tmp_path / "a.csv").write_bytes(b'text\n"' + b"word\n" * 1000)
    with pytest.raises(BadInput, match=r"line \d+: not CSV \(field larger than field limit"):
        documents(tmp_path / "a.csv", "csv")


@pytest.fixture
def pyarrow() -> Any:
    pytest.importorskip("pyarrow", reason="Parquet and Arrow need the extra data")
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    return pyarrow


def table_of(pyarrow: Any, texts: Any, text_type: str = "string") -> Any:
    types = {"dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), "large": pyarrow.large_string()}
    texts = pyarrow.array(texts, types.get(text_type, pyarrow.string()))
    return pyarrow.table({"id": list(range(len(texts))), "text": texts})


def write_arrow(pyarrow: Any, path: Path, table: Any, *, rows_in_batch: int = 2, is_stream: bool = True) -> None:
    new = pyarrow.ipc.new_stream if is_stream else pyarrow.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_in_batch)


@pytest.mark.parametrize("text_type", ["string", "large", "dictionary"])
def test_parquet_and_arrow_give_back_what_was_written(tmp_path: Path, pyarrow: Any, text_type: str) -> None:
    table = table_of(pyarrow, TEXTS, text_type)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    write_arrow(pyarrow, tmp_path / "stream.arrow", table)
    write_arrow(pyarrow, tmp_path / "file.arrow", table, is_stream=False)
    assert documents(tmp_path / "a.parquet", "parquet") == TEXTS
    assert documents(tmp_path / "stream.arrow", "arrow") == TEXTS
    assert documents(tmp_path / "file.arrow", "arrow") == TEXTS


@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_spans_do_not_show(tmp_path: Path, pyarrow: Any, monkeypatch: pytest.MonkeyPatch, file_format: Format) -> None:
    texts = [f"text {number} " * (number % 7) for number in range(1000)]
    path = tmp_path / "a"
    if file_format == "parquet":
        pyarrow.parquet.write_table(table_of(pyarrow, texts), path, row_group_size=30)
    else:
        write_arrow(pyarrow, path, table_of(pyarrow, texts), rows_in_batch=30)
    monkeypatch.setattr(pieces, "SPAN_BYTES", 3000)
    spans = spans_of(SourceFile(path, file_format))
    assert len(spans) > 5
    assert sum(span.num_bytes for span in spans) == path.stat().st_size
    assert documents(path, file_format) == texts
    reached = [piece.bytes_read for piece in read_pieces(SourceFile(path, file_format))]
    assert reached == sorted(reached)
    assert reached[-1] == path.stat().st_size


def test_an_empty_table_holds_no_documents(tmp_path: Path, pyarrow: Any) -> None:
    pyarrow.parquet.write_table(table_of(pyarrow, []), tmp_path / "a.parquet")
    write_arrow(pyarrow, tmp_path / "a.arrow", table_of(pyarrow, []))
    assert documents(tmp_path / "a.parquet", "parquet") == documents(tmp_path / "a.arrow", "arrow") == []


@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_a_table_that_cannot_be_is_refused(tmp_path: Path, pyarrow: Any, file_format: Format) -> None:
    def refused(table: Any, complaint: str) -> None:
        path = tmp_path / f"a.{file_format}"
        if file_format == "parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            write_arrow(pyarrow, path, table)
        with pytest.raises(BadInput, match=complaint) as caught:
            documents(path, file_format)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    array = pyarrow.array
    refused(pyarrow.table({"id": [1], "body": ["a"]}), r"has no column 'text'; its columns are 'id', 'body'")
    refused(pyarrow.table([array(["a"]), array(["b"])], names=["text", "text"]), "has several columns 'text'")
    refused(pyarrow.table({"text": [1]}), r"column 'text' holds int64, not text")
    refused(pyarrow.table({"text": [["a"]]}), r"column 'text' holds list<.*>, not text")
    refused(pyarrow.table({"text": ["a", None, "b"]}), r"row 2: field 'text' holds null, not a string")
    bad = array([b"fine", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    refused(pyarrow.table({"text": bad}), r"rows 1 to 2: field 'text' holds bytes that are not UTF-8")


@pytest.mark.parametrize("keep", [0, 3, 0.3, 0.9])
@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, pyarrow: Any, file_format: Format, keep: float) -> None:
    path = tmp_path / "a"
    table = table_of(pyarrow, [f"text {number}" * 20 for number in range(2000)])
    if file_format == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        write_arrow(pyarrow, path, table, rows_in_batch=100)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(
        BadInput, match=rf"a is no whole {file_format.capitalize()} file: [^\n]+; fetch or write it again"
    ):
        documents(path, file_format)


def saved(pyarrow: Any, folder: Path, texts: list[str], num_files: int = 2) -> Path:
    """A folder as ``datasets.Dataset.save_to_disk`` writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{num_files:05}.arrow" for number in range(num_files)]
    for number, name in enumerate(names):
        write_arrow(pyarrow, folder / name, table_of(pyarrow, texts[number::num_files]))
    (folder / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train", "_fingerprint": "f"}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def test_a_folder_that_datasets_saved_is_its_arrow_files(tmp_path: Path, pyarrow: Any) -> None:
    folder = saved(pyarrow, tmp_path / "set", ["a", "b", "c"])
    (folder / "cache-1.arrow").write_bytes(b"of another computation")
    files = find_files([str(folder)])
    assert [(file.path.name[:10], file.format) for file in files] == [("data-00000", "arrow"), ("data-00001", "arrow")]
    assert [text for file in files for text in documents(file.path, "arrow")] == ["a", "c", "b"]


def test_a_folder_of_one_split_is_that_split(tmp_path: Path, pyarrow: Any) -> None:
    saved(pyarrow, tmp_path / "sets" / "train", ["a"], 1)
    (tmp_path / "sets" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert len(find_files([str(tmp_path / "sets")])) == 1
    saved(pyarrow, tmp_path / "sets" / "test", ["b"], 1)
    (tmp_path / "sets" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(BadInput, match=r"sets holds the splits 'train', 'test': name one, such as .*sets/train"):
        find_files([str(tmp_path / "sets")])
    assert len(find_files([str(tmp_path / "sets" / "test")])) == 1


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ({"_data_files": [{"filename": "../secret.arrow"}]}, "names '../secret.arrow' as a part of the dataset"),
        ({"_data_files": [{"filename": "/etc/passwd"}]}, "names '/etc/passwd' as a part"),
        ({"_data_files": [{"filename": ".."}]}, r"names '\.\.' as a part"),
        ({"_data_files": [{}]}, "names 'None' as a part"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, r"gone\.arrow is not a regular file"),
        ({}, "names 'None' as a part"),
        ({"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}, "a selection of its rows: save its"),
        ([], r"state\.json is no JSON object"),
    ],
)
def test_a_hostile_state_is_refused(tmp_path: Path, state: Any, complaint: str) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "secret.arrow").write_bytes(b"")
    (tmp_path / "set" / "state.json").write_text(json.dumps(state))
    with pytest.raises(BadInput, match=complaint):
        find_files([str(tmp_path / "set")])


@pytest.mark.slow
def test_what_datasets_saves_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="only compares with the library itself")
    texts = [f"text {number}" for number in range(2500)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "set", num_shards=3)
    files = find_files([str(tmp_path / "set")])
    assert [text for file in files for text in documents(file.path, "arrow")] == texts
