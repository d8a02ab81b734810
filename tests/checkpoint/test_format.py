"""Does a manifest say what was written, and is everything else refused in one sentence, damaged or hostile?"""

import hashlib
import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.checkpoint.format import (
    FileEntry,
    Manifest,
    TensorEntry,
    block_key,
    boxes,
    check_name,
    folder_name,
    is_own_file,
    parse_folder_name,
    read_manifest,
    write_manifest,
)
from triax.errors import BadInput


def manifest() -> Manifest:
    return Manifest(
        step=1000,
        run="5f0c",
        extra={"tokens": 2**40, "skipped": [[3, 4]], "lr": 3e-4, "note": 'ünï "quoted"\n'},
        versions={"torch": "2.13.0"},
        files=(
            FileEntry(name="shard-00000-of-00002.safetensors", bytes=400, sha256="a" * 64),
            FileEntry(name="shard-00001-of-00002.safetensors", bytes=300, sha256="b" * 64),
        ),
        tensors={
            "embed.weight": TensorEntry(dtype="F32", shape=(5, 3), cuts=((0, 3, 5), (0, 3)), files=(0, 1)),
            "optimizer.step": TensorEntry(dtype="F32", shape=(), cuts=(), files=(1,)),
            "empty": TensorEntry(dtype="I64", shape=(0, 3), cuts=((0,), (0, 3)), files=()),
        },
    )


def sealed(fields: Any) -> bytes:
    """A manifest with any contents under a checksum that is right: what someone hostile would write."""
    text = json.dumps(fields) if not isinstance(fields, str) else fields
    body = (text.rstrip()[:-1] + ",\n").encode()
    return body + f'"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def plain() -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(write_manifest(manifest()))
    del fields["sha256"]
    return fields


def test_what_was_written_is_read() -> None:
    data = write_manifest(manifest())
    assert read_manifest(data) == manifest()
    assert json.loads(data)["tensors"]["embed.weight"]["cuts"] == [[0, 3, 5], [0, 3]]  # any JSON reader will do
    assert read_manifest(sealed(plain())) == manifest()


def test_every_flipped_bit_and_every_prefix_is_refused() -> None:
    data = write_manifest(manifest())
    for position in range(len(data)):
        for bit in (0, 5, 7):
            flipped = data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]
            with pytest.raises(BadInput, match="damaged"):
                read_manifest(flipped)
        with pytest.raises(BadInput, match="damaged"):
            read_manifest(data[:position])
    with pytest.raises(BadInput, match="damaged"):
        read_manifest(data + b"\n")


def changed(path: str, value: Any) -> bytes:
    """The manifest with the field at ``path`` set, all else right."""
    fields = plain()
    *parents, last = path.split("/")
    inner: Any = fields
    for key in parents:
        inner = inner[int(key)] if isinstance(inner, list) else inner[key]
    inner[int(last) if isinstance(inner, list) else last] = value
    return sealed(fields)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("format_version", 2, "version 2; this triax reads 'triax-checkpoint' version 1"),
        ("format", "elsewhere", "format 'elsewhere'"),
        ("step", -1, "step"),
        ("step", 1.5, "step"),
        ("step", 10**30, "step"),
        ("files/0/name", "../../etc/passwd", "files.0.name"),
        ("files/0/name", "/etc/passwd", "files.0.name"),
        ("files/0/name", "shard-00000-of-00002.safetensors\n", "files.0.name"),
        ("files/0/name", "sub/shard-00000-of-00002.safetensors", "files.0.name"),
        ("files/0/name", "shard-00001-of-00002.safetensors", "two files have one name"),
        ("files/0/bytes", 2**70, "files.0.bytes"),
        ("files/0/bytes", 7, "cannot lie in"),
        ("files/0/sha256", "A" * 64, "files.0.sha256"),
        ("tensors/embed.weight/dtype", "PICKLE", "none of F64"),
        ("tensors/embed.weight/shape", [2**40, 2**40], "do not rise from 0"),
        ("tensors/embed.weight/shape", [1] * 17, "shape"),
        ("tensors/embed.weight/cuts", [[0, 2**61], [0, 2**61]], "do not rise from 0"),
        ("tensors/embed.weight/cuts", [[0, 5], [0, 3]], "1 blocks and files are named for 2"),
        ("tensors/embed.weight/cuts", [[0, 3, 3, 5], [0, 3]], "do not rise"),
        ("tensors/embed.weight/cuts", [[1, 3, 5], [0, 3]], "do not rise"),
        ("tensors/embed.weight/cuts", [[0, 3, 5]], "2 dims has cuts for 1"),
        ("tensors/embed.weight/files", [0, 2], "file number 2 of 2"),
        ("tensors/embed.weight/files", [0, -1], "files.1"),
        ("tensors/embed.weight/surprise", 1, "surprise"),
        ("tensors/bad@name", {"dtype": "F32", "shape": [], "cuts": [], "files": [0]}, "bad@name"),
        ("surprise", 1, "surprise"),
        ("extra", [], "extra"),
        ("tensors", None, "tensors"),
    ],
)
def test_hostile_contents_are_refused(path: str, value: Any, says: str) -> None:
    with pytest.raises(BadInput) as raised:
        read_manifest(changed(path, value))
    assert says in str(raised.value)
    assert len(str(raised.value)) < 700
    assert "\n" not in str(raised.value)


def test_a_shape_that_fits_its_cuts_but_no_file_is_refused() -> None:
    huge = {"dtype": "F32", "shape": [2**60], "cuts": [[0, 2**60]], "files": [0]}
    with pytest.raises(BadInput, match="cannot lie in"):
        read_manifest(changed("tensors/embed.weight", huge))


@pytest.mark.parametrize(
    "text",
    [
        '{"format": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"extra": ' + '{"a":' * 5_000 + "1" + "}" * 5_000 + "}",
        '{"format": "triax-checkpoint", "format_version": ' + "9" * 10_000 + "}",
        "{}",
        "[]",
        "}",
        "not json",
        '{"format": "triax-checkpoint", "format_version": true}',
    ],
)
def test_hostile_json_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        read_manifest(sealed(text))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadInput):
        read_manifest(data)


@given(st.data())
def test_any_value_in_any_field_is_read_or_refused_in_a_sentence(data: st.DataObject) -> None:
    fields = plain()
    where: Any = fields
    while isinstance(where, dict | list) and where:
        keys = list(where) if isinstance(where, dict) else list(range(len(where)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(where[key], dict | list) or data.draw(st.booleans()):
            where[key] = data.draw(JSON)
            break
        where = where[key]
    refusal = ""
    try:
        read_manifest(sealed(fields))
    except BadInput as error:
        refusal = str(error)
    assert len(refusal) < 700
    assert "\n" not in refusal


@given(st.data())
def test_blocks_touching_a_box_are_those_that_share_elements_with_it(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 8), max_size=3)))
    cuts = tuple(tuple(sorted({0, size, *data.draw(st.sets(st.integers(0, size), max_size=3))})) for size in shape)
    num_blocks = math.prod(len(of_dim) - 1 for of_dim in cuts)
    entry = TensorEntry(dtype="F32", shape=shape, cuts=cuts, files=tuple(range(num_blocks)))
    ranges = [
        data.draw(st.sampled_from([(a, b) for a in range(size) for b in range(a + 1, size + 1)])) for size in shape
    ]
    box = tuple(ranges)
    touching = [
        (block, file)
        for file, block in enumerate(boxes(cuts))
        if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(block, box, strict=True))
    ]
    assert list(entry.blocks_touching(box)) == touching
    assert [block for block, _ in entry.blocks()] == list(boxes(cuts))
    assert all(len(list(pairwise(of_dim))) == len(of_dim) - 1 for of_dim in cuts)


def test_names() -> None:
    assert folder_name(1000) == "step-00001000"
    assert folder_name(1000, 2) == "step-00001000-2"
    for step, attempt in ((0, 0), (1000, 0), (10**9, 12)):
        assert parse_folder_name(folder_name(step, attempt)) == (step, attempt)
    for other in ("step-1000", "step-00001000-0", "step-00001000.tmp", "latest", "step-00001000-1\n", "step-٠٠٠٠١٠٠٠"):
        assert parse_folder_name(other) is None
    assert block_key("w", ((0, 5), (0, 3)), (5, 3)) == "w"
    assert block_key("w", ((3, 5), (0, 3)), (5, 3)) == "w@3,0"
    assert block_key("w", (), ()) == "w"
    own = (
        "manifest.json",
        "manifest.json.tmp",
        "written-by.json",
        "part-00003.json",
        "shard-00000-of-00001.safetensors",
    )
    assert all(is_own_file(name) for name in own)
    assert not any(is_own_file(name) for name in ("notes.txt", "model.safetensors", "manifest.json.bak", "latest"))
    for name in ("", "a@b", "a\nb", "a" * 513):
        with pytest.raises(BadInput, match="cannot name a tensor"):
            check_name(name)


def test_extra_that_is_not_json_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match="finite"):
        Manifest(step=1, run="r", extra={"loss": math.nan}, versions={}, files=(), tensors={})
