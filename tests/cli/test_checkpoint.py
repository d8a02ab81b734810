"""Do list, verify and prune say what is there, in whatever state a folder is, and does prune remove nothing else?"""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.cli.typed import Typed, contents, refuse
from triax.checkpoint.save import CheckpointWriter
from triax.checkpoint.verify import find_checkpoints
from triax.spec.layout import Layout
from triax.train.run_folder import RunFolder


def save(folder: Path, *steps: int, run: str = "mine") -> None:
    writer = CheckpointWriter(folder, keep=9, run=run)
    extra = {"layout": Layout(pp=1, dp_shard=2, tp=1).model_dump(mode="json")}
    for step in steps:
        outcome = writer.save(step, {"w": torch.full((3,), float(step)), "b": torch.ones(1)}, extra, wait=True).outcome
        assert outcome is not None
        assert outcome.ok


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's checkpoints of steps 2, 4, 6 and 8 (damaged), an interrupted save, and what others have put there."""
    folder = tmp_path / "run" / "checkpoints"
    save(folder, 2, 4, 6, 8)
    save(folder, 5, run="another")
    (folder / "step-00000008" / "shard-00000-of-00001.safetensors").write_bytes(b"short")
    save(folder, 9)
    (folder / "step-00000009" / "manifest.json").unlink()
    (folder / "step-00000010").mkdir()
    (folder / "step-00000011").mkdir()
    (folder / "step-00000011" / "notes.txt").write_text("mine")
    (folder / "step-00000012").symlink_to("/nowhere")
    (folder / "step-00000013").write_text("no folder")
    return folder


def test_list_says_step_size_layout_age_and_whether_each_is_whole(folder: Path, here: Typed) -> None:
    told = here("checkpoint", "list", "run")
    assert (told.code, told.err) == (0, "")
    said = {line.split()[0]: line for line in told.out.splitlines()}
    assert list(said) == [f"step-{step:08d}" for step in (11, 10, 9, 8, 6, 5, 4, 2)]
    for name in ("step-00000011", "step-00000010", "step-00000009"):
        assert "not finished" in said[name]
    assert "shard-00000-of-00001.safetensors has 5 bytes instead of" in said["step-00000008"]
    assert " old  whole, saved in " in said["step-00000006"]
    assert "dp_shard=2" in said["step-00000006"]


def test_list_as_json(folder: Path, here: Typed) -> None:
    told = here("checkpoint", "list", folder, "--json", "-")
    rows = {row["step"]: row for row in json.loads(told.out)["checkpoints"]}
    assert [step for step, row in rows.items() if row["is_whole"]] == [6, 5, 4, 2]
    assert rows[5]["run"] == "another"
    assert rows[9]["problem"] == "not finished"
    assert rows[9]["age_s"] is None
    assert 0 <= rows[6]["age_s"] < 60
    assert rows[6]["bytes"] == sum(len(data) for data in contents(folder / "step-00000006").values())
    here("checkpoint", "list", folder, "--json", "out.json")
    assert len(json.loads(Path("out.json").read_text())["checkpoints"]) == 8


def test_verify_names_every_file_that_is_wrong(tmp_path: Path, here: Typed) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1, 2)
    assert here("checkpoint", "verify", ".").out.splitlines() == ["step-00000002: whole", "step-00000001: whole"]
    # Two files of one checkpoint, made by hand since one rank writes one: the manifest names both.
    from triax.checkpoint.format import FileEntry, read_manifest, write_manifest

    path = folder / "step-00000002"
    manifest = read_manifest((path / "manifest.json").read_bytes())
    second = FileEntry(name="shard-00001-of-00002.safetensors", bytes=4, sha256="0" * 64)
    (path / second.name).write_bytes(b"four")
    both = manifest.model_copy(update={"files": (*manifest.files, second)})
    (path / "manifest.json").write_bytes(write_manifest(both))
    (path / manifest.files[0].name).write_bytes(b"")
    told = here("checkpoint", "verify", ".", "--json", "-")
    assert told.code == 1
    assert "1 of 2 saved states cannot be trusted" in told.sentence
    rows = json.loads(told.out)["checkpoints"]
    assert [row["is_whole"] for row in rows] == [False, True]
    for file in both.files:
        assert file.name in rows[0]["problem"]
    assert here("checkpoint", "verify", path).code == 1
    assert here("checkpoint", "verify", folder / "step-00000001").code == 0


def test_prune_keeps_the_newest_and_what_this_run_did_not_write(folder: Path, here: Typed) -> None:
    before = contents(folder)
    told = here("checkpoint", "prune", "run", "--keep", 2, "--dry-run")
    assert contents(folder) == before
    assert "step-00000002: would be removed" in told.out
    told = here("checkpoint", "prune", "run", "--keep", 2)
    assert (told.code, told.err) == (0, "")
    removed = [line.split(":")[0] for line in told.out.splitlines() if ": removed" in line]
    assert removed == ["step-00000002", "step-00000010", "step-00000009"]
    assert [found.step for found in find_checkpoints(folder)] == [11, 8, 6, 5, 4]
    after = contents(folder)
    assert {name: after[name] for name in after} == {name: data for name, data in before.items() if name in after}
    assert "step-00000011: stays (not finished), this run did not write it" in told.out
    assert "step-00000005: stays, this run did not write it" in told.out
    assert (folder / "step-00000012").is_symlink()
    assert here("checkpoint", "prune", "run", "--keep", 2, "--json", "-").out.count("is_removed") == 0


def test_prune_of_what_cannot_be_pruned_removes_nothing(tmp_path: Path, here: Typed) -> None:
    refuse(here("checkpoint", "prune", "nope"), "nope is no folder")
    refuse(here("checkpoint", "prune", "."), "holds no whole state to keep: nothing is removed")
    refuse(here("checkpoint", "prune", ".", "--keep", 0), "--keep")
    save(tmp_path / "checkpoints", 1, 2)
    (tmp_path / "checkpoints" / "step-00000002" / "written-by.json").unlink()
    before = contents(tmp_path)
    refuse(here("checkpoint", "prune", "."), "step-00000002 does not say which run wrote it")
    assert contents(tmp_path) == before


def test_prune_waits_for_no_run_that_is_going(folder: Path, here: Typed) -> None:
    (folder.parent / "resolved.toml").write_text("")
    before = contents(folder)
    with RunFolder(folder.parent).locked():
        refuse(here("checkpoint", "prune", "run"), "belongs to a run that is still going")
    assert contents(folder) == before
    assert here("checkpoint", "prune", "run").code == 0


@pytest.mark.parametrize("verb", ["list", "verify", "prune"])
def test_a_folder_full_of_nonsense_is_one_sentence(verb: str, tmp_path: Path, here: Typed) -> None:
    folder = tmp_path / "checkpoints"
    for number, text in enumerate(("", "{}", "null", "[" * 5000, '{"format": "triax-checkpoint"}\x00', "\xff")):
        (folder / f"step-{number:08d}").mkdir(parents=True)
        (folder / f"step-{number:08d}" / "manifest.json").write_text(text)
        (folder / f"step-{number:08d}" / "written-by.json").write_text(text)
    (folder / "step-00000007").mkdir()
    os.mkfifo(folder / "step-00000007" / "manifest.json")
    os.mkfifo(folder / "step-00000007" / "written-by.json")
    (folder / "step-00000008").symlink_to(folder)
    before = {path: path.lstat().st_size for path in folder.rglob("*")}
    told = here("checkpoint", verb, ".")
    assert told.code in {"list": (0,), "verify": (1,), "prune": (2,)}[verb]
    assert "Traceback" not in told.out + told.err
    assert len(told.err.splitlines()) == (0 if verb == "list" else 1)
    assert {path: path.lstat().st_size for path in folder.rglob("*")} == before
