"""Do exactly those checkpoints go that may go: old ones of this run, and nothing that anyone else wrote?"""

import json
from pathlib import Path

import pytest
import torch

from triax.checkpoint import operations
from triax.checkpoint.load import load
from triax.checkpoint.retain import owner, remove
from triax.checkpoint.save import CheckpointWriter
from triax.checkpoint.verify import find_checkpoints, newest_verified


def save(folder: Path, *steps: int, keep: int = 2, run: str = "mine") -> CheckpointWriter:
    writer = CheckpointWriter(folder, keep=keep, run=run)
    for step in steps:
        outcome = writer.save(step, {"w": torch.full((3,), float(step))}, {}, wait=True).outcome
        assert outcome is not None
        assert outcome.ok
        assert outcome.reason == ""
    return writer


def steps(folder: Path) -> list[int]:
    return [found.step for found in find_checkpoints(folder)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_the_newest_stay(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep=3)
    assert steps(tmp_path) == [4, 3, 2]
    save(tmp_path, 5, keep=1)
    assert steps(tmp_path) == [5]
    assert json.loads((tmp_path / "latest").read_text())["checkpoint"] == "step-00000005"


def test_nothing_goes_that_this_run_did_not_write(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    save(elsewhere, 1)
    folder = tmp_path / "checkpoints"
    save(folder, 2, run="another")
    save(folder, 3, 4)
    (folder / "step-00000005").symlink_to(elsewhere / "step-00000001")  # in the place of an old one, looks like ours
    (folder / "step-00000006").mkdir()
    (folder / "step-00000006" / "model.safetensors").write_text("from elsewhere")
    (folder / "step-00000007").mkdir()
    (folder / "step-00000007" / "written-by.json").write_text('{"format": "triax-checkpoint", "run": ["mine"]}')
    (folder / "notes.txt").write_text("mine")
    (folder / "step-00000003" / "notes.txt").write_text("mine")
    before = contents(elsewhere / "step-00000001")
    save(folder, 8, 9, keep=1)
    assert contents(elsewhere / "step-00000001") == before
    assert steps(folder) == [9, 7, 6, 5, 3, 2]
    assert contents(folder / "step-00000003").keys() == {"notes.txt", "written-by.json"}
    assert (folder / "notes.txt").exists()
    assert newest_verified(folder)[0] is not None
    assert owner(folder / "step-00000005") is None
    assert owner(folder / "step-00000007") is None


def test_what_an_interrupted_save_left_goes_with_the_next(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    (tmp_path / "step-00000003").mkdir()
    save(tmp_path / "other", 4, run="another")
    (tmp_path / "other" / "step-00000004" / "manifest.json").unlink()
    (tmp_path / "other" / "step-00000004").rename(tmp_path / "step-00000004")
    save(tmp_path, 2)
    assert steps(tmp_path) == [4, 2, 1]  # the fourth is another's
    assert newest_verified(tmp_path)[0] is not None


def test_a_step_saved_again_replaces_the_first_only_once_it_is_whole(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    first = contents(tmp_path / "step-00000002")
    shard = tmp_path / "step-00000002" / "shard-00000-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    checkpoint, passed_over = newest_verified(tmp_path)
    assert checkpoint is not None
    assert checkpoint.manifest.step == 1
    assert len(passed_over) == 1
    # The run goes on from step 1 and comes to step 2 again.
    save(tmp_path, 2)
    assert [found.folder.name for found in find_checkpoints(tmp_path)] == ["step-00000002-1", "step-00000001"]
    checkpoint, passed_over = newest_verified(tmp_path)
    assert checkpoint is not None
    assert passed_over == []
    assert contents(checkpoint.folder)[shard.name] == first[shard.name]
    assert json.loads((tmp_path / "latest").read_text())["checkpoint"] == "step-00000002-1"


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, keep=3)
    shard = tmp_path / "step-00000003" / "shard-00000-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    save(tmp_path, 4, keep=2)
    assert steps(tmp_path) == [4, 3, 2]
    save(tmp_path, 5, keep=2)
    assert steps(tmp_path) == [5, 4]


def test_later_steps_do_not_count_and_stay(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 8, 9, keep=9)
    save(tmp_path, 3, keep=2)
    assert steps(tmp_path) == [9, 8, 3, 2]


def test_going_back_discards_the_history_that_is_left(tmp_path: Path) -> None:
    writer = save(tmp_path, 1, 2, 3, 4, keep=9)
    save(tmp_path, 5, keep=9, run="another")
    assert writer.discard_after(2) == ""
    assert steps(tmp_path) == [5, 2, 1]
    writer = save(tmp_path, 3, keep=9)
    assert writer.discard_after(9) == ""
    assert steps(tmp_path) == [5, 3, 2, 1]
    got = {"w": torch.zeros(3)}
    checkpoint, _ = newest_verified(tmp_path)
    assert checkpoint is not None
    load(checkpoint, got)


def test_a_removal_that_is_interrupted_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 2)
    unlink = operations.unlink
    for allowed in range(4):
        folder = tmp_path / "step-00000002"
        calls = 0

        def stop(path: Path, limit: int = allowed) -> None:
            nonlocal calls
            if calls == limit:
                raise KeyboardInterrupt
            calls += 1
            unlink(path)

        with monkeypatch.context() as patch:
            patch.setattr(operations, "unlink", stop)
            try:
                remove(folder)
            except KeyboardInterrupt:
                assert owner(folder) == "mine"
                assert (folder / "manifest.json").exists() == (allowed == 0)
                checkpoint, _ = newest_verified(tmp_path)
                assert checkpoint is not None
                assert checkpoint.manifest.step == (2 if allowed == 0 else 1)
    assert steps(tmp_path) == [1]
