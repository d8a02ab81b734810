"""Are checkpoints from elsewhere refused safely: nothing in them run, nothing outside read, nothing believed?"""

import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from triax.checkpoint.find import find_verified
from triax.checkpoint.format import FileEntry, Manifest, TensorEntry, read_manifest, write_manifest
from triax.checkpoint.load import load, read_tensor
from triax.checkpoint.save import CheckpointWriter
from triax.checkpoint.verify import newest_verified, verified
from triax.errors import BadInput

SHARD = "shard-00000-of-00001.safetensors"


class Payload:
    """What a pickle may do to who opens it."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.witness),)


def sealed(folder: Path, data: bytes, **tensors: TensorEntry) -> Path:
    """A checkpoint whose manifest is in order and tells the truth about one file that holds ``data``."""
    folder.mkdir(parents=True)
    (folder / SHARD).write_bytes(data)
    file = FileEntry(name=SHARD, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    manifest = Manifest(step=1, run="toy", extra={}, versions={}, files=(file,), tensors=tensors)
    (folder / "manifest.json").write_bytes(write_manifest(manifest))
    return folder


def entry(*shape: int) -> TensorEntry:
    return TensorEntry(dtype="F32", shape=shape, cuts=tuple((0, size) for size in shape), files=(0,))


def test_a_pickle_in_the_place_of_a_shard_is_not_opened(tmp_path: Path) -> None:
    witness = tmp_path / "run"
    for number, data in enumerate((pickle.dumps(Payload(witness)), _zip_of(witness, tmp_path))):
        checkpoint = verified(sealed(tmp_path / f"step-{number:08d}", data, w=entry(2)))
        with pytest.raises(BadInput, match="does not hold what its manifest says"):
            load(checkpoint, {"w": torch.zeros(2)})
        with pytest.raises(BadInput, match="does not hold what its manifest says"):
            read_tensor(checkpoint, "w")
    assert not witness.exists()


def _zip_of(witness: Path, scratch: Path) -> bytes:
    torch.save({"w": Payload(witness)}, scratch / "model.pt")
    return (scratch / "model.pt").read_bytes()


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", ".metadata", "__0_0.distcp", "manifest.json"])
def test_folders_of_other_tools_are_told_apart(name: str, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Payload(witness)))
    for find in (verified, find_verified):
        with pytest.raises(BadInput, match=r"holds no finished checkpoint|cannot be used"):
            find(folder)
    assert newest_verified(tmp_path)[0] is None
    assert not witness.exists()


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/../../secret", "shard-00000-of-00001.safetensors/../../x", "manifest.json"]
)
def test_a_manifest_cannot_name_files_elsewhere(name: str, tmp_path: Path) -> None:
    folder = sealed(tmp_path / "step-00000001", b"x" * 64, w=entry(2))
    text = (folder / "manifest.json").read_bytes().replace(SHARD.encode(), name.encode())
    body = text[: text.rindex(b'"sha256"')]
    (folder / "manifest.json").write_bytes(body + f'"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode())
    with pytest.raises(BadInput, match="contradicts itself"):
        verified(folder)


def test_a_size_that_no_machine_has_asks_for_no_memory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot lie in"):
        sealed(tmp_path / "step-00000001", b"x" * 64, w=entry(1 << 40, 1 << 18))
    # A file may claim what it likes where nothing is stored: a hole of a terabyte.
    folder = sealed(tmp_path / "step-00000002", b"x" * 64, w=entry(2))
    manifest = read_manifest((folder / "manifest.json").read_bytes())
    wide = manifest.model_copy(
        update={
            "files": (manifest.files[0].model_copy(update={"bytes": 1 << 43}),),
            "tensors": {"w": entry(1 << 40)},
        }
    )
    (folder / "manifest.json").write_bytes(write_manifest(wide))
    with pytest.raises(BadInput, match=r"has 64 bytes instead of 8796093022208"):
        verified(folder)


def test_a_header_that_lies_about_its_tensors_is_refused(tmp_path: Path) -> None:
    for number, header in enumerate(
        (
            b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,800]}}',
            b'{"w":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,8]}}',
            b'{"w":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}',
            b'{"v":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
            b"[" * 100_000,
        )
    ):
        for length in (len(header), 1 << 62):
            data = length.to_bytes(8, "little") + header + b"\0" * 8
            folder = tmp_path / f"step-{number:08d}-{1 + (length > 1 << 60)}"
            with pytest.raises(BadInput, match="does not hold what its manifest says"):
                load(verified(sealed(folder, data, w=entry(2))), {"w": torch.zeros(2)})


def test_what_others_wrote_is_never_removed_by_a_run(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    folder = tmp_path / "checkpoints"
    sealed(folder / "step-00000001", b"theirs" * 20, w=entry(2))
    (folder / "step-00000002").mkdir()
    (folder / "step-00000002" / "model.pt").write_bytes(pickle.dumps(Payload(witness)))
    sealed(folder / "step-00000003", b"theirs" * 20, w=entry(2))
    (folder / "step-00000003" / "written-by.json").write_text('{"format": "triax-checkpoint", "run": "another"}')
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    writer = CheckpointWriter(folder, keep=1, run="toy")
    for step in (4, 5):
        outcome = writer.save(step, {"w": torch.ones(2)}, {}, wait=True).outcome
        assert outcome is not None
        assert outcome.ok
    assert writer.discard_after(0) == ""
    assert {path: path.read_bytes() for path in before} == before
    assert not witness.exists()
