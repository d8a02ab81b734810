"""Are safetensors files from elsewhere read as the library reads them, and hostile ones refused in a sentence?"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from triax.checkpoint.tensor_file import Rows, lay_out, read_header
from triax.errors import BadInput

WHOLE = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4, dtype=torch.bfloat16), "empty": torch.ones(0, 3)}


def write(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def test_tensors_and_rows_are_those_of_the_library(tmp_path: Path) -> None:
    save_file(WHOLE, tmp_path / "f")
    header = read_header(tmp_path / "f")
    assert header.keys() == WHOLE.keys()
    for name, expected in load_file(tmp_path / "f").items():
        stored = header[name]
        assert torch.equal(Rows(stored, 0, stored.shape).tensor(), expected)
    assert torch.equal(Rows(header["a"], 1, (1, 3)).tensor(), WHOLE["a"][1:])
    assert b"".join(bytes(piece) for piece in Rows(header["a"], 1, (1, 3)).chunks()) == WHOLE["a"][1:].numpy().tobytes()


def test_what_is_laid_out_is_read_by_the_library(tmp_path: Path) -> None:
    layout = lay_out([("half", "BF16", (4,)), ("whole", "F32", (2, 3)), ("one", "F64", ())])
    assert [name for name, _, _ in layout.places] == ["one", "whole", "half"]
    (tmp_path / "f").write_bytes(layout.header + bytes(range(40)))
    assert layout.num_bytes == len(layout.header) + 40
    with safe_open(tmp_path / "f", framework="pt") as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes == {"half": [4], "whole": [2, 3], "one": []}


@pytest.mark.parametrize(
    ("header", "data", "sentence"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "'b' overlaps another tensor"),
        ({"a": entry(0, 8), "b": entry(0, 8)}, 8, "overlaps another tensor"),
        ({"a": entry(0, 8), "b": entry(12, 16)}, 16, "'b' leaves bytes before it"),
        ({"a": entry(4, 8)}, 8, "'a' leaves bytes before it"),
        ({"a": entry(0, 8)}, 4, "was cut short: its tensors take"),
        ({"a": entry(0, 8)}, 12, "4 bytes belong to no tensor"),
        ({"a": entry(0, 8, [3])}, 8, "does not take the bytes from 0 to 8"),
        ({"a": entry(0, 8, [1 << 61, 1 << 61])}, 8, "does not take the bytes"),
        ({"a": entry(0, 8, [-2])}, 8, "is no tensor"),
        ({"a": entry(0, 8, [2.0])}, 8, "is no tensor"),
        ({"a": entry(0, 8, [True])}, 8, "is no tensor"),
        ({"a": entry(0, 8, [1] * 17 + [2])}, 8, "is no tensor"),
        ({"a": entry(0, 8, dtype="x" * 50)}, 8, "is no tensor"),
        ({"a": entry(8, 0, [0])}, 8, "does not take the bytes"),
        ({"a": entry(0, 1 << 63)}, 8, "is no tensor"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "says no dtype, shape and data_offsets"),
        ({"a": [0, 8]}, 8, "says no dtype, shape and data_offsets"),
        ({"a\n": entry(0, 8)}, 8, "names a tensor"),
        ({"": entry(0, 8)}, 8, "names a tensor"),
        ([], 0, "must hold an object"),
        (b'{"a": ' + json.dumps(entry(0, 8)).encode() + b', "a": ' + json.dumps(entry(0, 8)).encode() + b"}", 8,
         "'a' stands twice"),
        (b"\xff\xfe", 0, "its header is no text"),
        (b"{" * 5000, 0, "is not valid JSON"),
    ],
)  # fmt: skip
def test_a_hostile_header_is_refused_in_a_sentence(tmp_path: Path, header: Any, data: int, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence) as told:
        read_header(write(tmp_path / "f", header, bytes(data)))
    assert len(str(told.value)) < 600
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("length", [1, 17, 33_554_433, 1 << 40, (1 << 64) - 1])
def test_an_absurd_length_of_the_header_costs_nothing(tmp_path: Path, length: int) -> None:
    with pytest.raises(BadInput):
        read_header(write(tmp_path / "f", b"{}", length=length))


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "pointer").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    (tmp_path / "short").write_bytes(b"\x02\0\0")
    (tmp_path / "folder").mkdir()
    for name, sentence in (("pointer", "git lfs pull"), ("short", "no whole safetensors"), ("gone", "cannot be read")):
        with pytest.raises(BadInput, match=sentence):
            read_header(tmp_path / name)
    with pytest.raises(BadInput, match="is a directory"):
        read_header(tmp_path / "folder")


def test_a_file_that_became_shorter_is_told(tmp_path: Path) -> None:
    save_file(WHOLE, tmp_path / "f")
    stored = read_header(tmp_path / "f")["b"]
    with (tmp_path / "f").open("r+b") as file:
        file.truncate(stored.begin + 2)
    with pytest.raises(BadInput, match="became shorter"):
        Rows(stored, 0, stored.shape).tensor()


NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 8, 12, -1, 1 << 62]) | st.integers()
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I64", "F8_E4M3", "X"]),
        "shape": st.lists(st.integers(0, 3), max_size=3),
        "data_offsets": st.tuples(NUMBERS, NUMBERS).map(list),
    }
)


@given(st.dictionaries(st.text("ab.", max_size=3), ENTRIES, max_size=3), st.integers(0, 16), st.booleans())
def test_no_more_is_believed_than_the_library_believes(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], data: int, is_in_a_row: bool
) -> None:
    end = 0
    if is_in_a_row:  # or hardly any example would be legal
        for one in header.values():
            size = {"F32": 4, "BF16": 2, "I64": 8}.get(one["dtype"], 1) * int(torch.tensor(one["shape"]).prod())
            one["data_offsets"] = [end, end := end + size]
        data = end
    path = write(tmp_path_factory.getbasetemp() / "any", header, bytes(data))
    try:
        ours = read_header(path)
    except BadInput:
        return
    if any(one["dtype"] == "X" for one in header.values()):
        return  # told by who wants to use the tensor
    try:
        with safe_open(path, framework="pt") as file:
            assert ours.keys() == set(file.keys())
            assert all(list(ours[name].shape) == list(file.get_slice(name).get_shape()) for name in ours)
    except SafetensorError as error:
        raise AssertionError(f"the library refuses {header} in {data} bytes") from error
