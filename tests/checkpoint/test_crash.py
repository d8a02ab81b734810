"""Does a power failure at any moment of a save leave a state to go on from: the old one or the new one?"""

import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.checkpoint.crash import Change, Disk, contents, laid_out, merged, newest, picks, recorded
from tests.harness.ranks import run_ranks
from triax.checkpoint.load import load
from triax.checkpoint.save import CheckpointWriter
from triax.checkpoint.verify import newest_verified


def state(step: int, history: int = 0) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(12, dtype=torch.float32) * step + history, "history": torch.tensor(history)}


def save(folder: Path, *steps: int, keep: int = 9, history: int = 0) -> CheckpointWriter:
    writer = CheckpointWriter(folder, keep=keep, run="toy")
    for step in steps:
        outcome = writer.save(step, state(step, history), {"history": history}, wait=True).outcome
        assert outcome is not None
        assert (outcome.ok, outcome.reason) == (True, "")
    return writer


def gone_on_from(folder: Path) -> tuple[int, int]:
    """Step and history of what a restart would take, after its every bit was compared; zeros if there is none."""
    checkpoint, _ = newest_verified(folder)
    if checkpoint is None:
        return 0, 0
    step, history = checkpoint.manifest.step, checkpoint.manifest.extra["history"]
    assert isinstance(history, int)
    got = {name: torch.zeros_like(tensor) for name, tensor in state(1).items()}
    load(checkpoint, got)
    assert all(torch.equal(got[name], tensor) for name, tensor in state(step, history).items())
    return step, history


def crash_everywhere(
    before: dict[str, bytes],
    changes: Sequence[Change],
    scratch: Path,
    after: Callable[[set[str]], set[tuple[int, int]]],
) -> set[tuple[int, int]]:
    """Crash after every change, in every way; ``after`` says from the marks passed what may be gone on from then.

    Returns all that was gone on from.
    """
    disk, passed, seen = Disk(before), set[str](), set[tuple[int, int]]()
    for number, change in enumerate([Change("mark", "begin"), *changes]):
        disk.apply(change)
        if change.kind == "mark":
            passed.add(change.path)
        for pick in picks(disk, num_random=6, seed=number):
            folder = scratch / "after"
            laid_out(disk.after_a_crash(pick), folder)
            found = gone_on_from(folder / "checkpoints")
            assert found in after(passed), (number, change, found, sorted(contents(folder)))
            seen.add(found)
            shutil.rmtree(folder)
    return seen


def save_recorded(root: Path, step: int, keep: int = 9, history: int = 0) -> list[Change]:
    with recorded(root) as record:
        save(root / "checkpoints", step, keep=keep, history=history)
        record.mark("saved")
    return record.changes


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("older", [(), (1,), (1, 2)], ids=str)
def test_a_crash_leaves_the_old_state_or_the_new_one(older: tuple[int, ...], keep: int, ram: Path) -> None:
    root = ram / "run"
    root.mkdir()
    if older:
        save(root / "checkpoints", *older)
    before = contents(root)
    changes = save_recorded(root, 3, keep=keep)
    assert {change.kind for change in changes} >= {"make_folder", "open_new", "write", "sync", "rename"}
    old, new = (max(older, default=0), 0), (3, 0)
    seen = crash_everywhere(before, changes, ram, lambda passed: {new} if "saved" in passed else {old, new})
    assert seen == {old, new}


def test_a_step_saved_again_never_costs_the_first(ram: Path) -> None:
    root = ram / "run"
    save(root / "checkpoints", 1, 2)
    before = contents(root)
    changes = save_recorded(root, 2, keep=2, history=5)
    assert crash_everywhere(before, changes, ram, lambda _: {(2, 0), (2, 5)}) == {(2, 0), (2, 5)}


def test_a_history_that_was_left_never_comes_back(ram: Path) -> None:
    root = ram / "run"
    writer = save(root / "checkpoints", 1, 2, 3)
    before = contents(root)
    with recorded(root) as record:
        assert writer.discard_after(1) == ""
        record.mark("gone back")
        save(root / "checkpoints", 2, history=7)
        record.mark("saved")

    def after(passed: set[str]) -> set[tuple[int, int]]:
        if "saved" in passed:
            return {(2, 7)}
        return {(1, 0), (2, 7)} if "gone back" in passed else {(1, 0), (2, 0), (3, 0)}

    seen = crash_everywhere(before, record.changes, ram, after)
    assert seen == {(1, 0), (2, 0), (3, 0), (2, 7)}


def test_a_crash_while_several_ranks_save(ram: Path) -> None:
    root = ram / "run"

    def save_as_rank(rank: int, world: int) -> None:
        def mine(step: int) -> dict[str, torch.Tensor]:
            return {f"w.{rank}": torch.arange(5.0) * step}

        writer = CheckpointWriter(root / "checkpoints", keep=1, run="toy")
        first = writer.save(1, mine(1), {}, wait=True).outcome
        torch.distributed.barrier()
        if rank == 0:
            shutil.copytree(root, ram / "before")
        torch.distributed.barrier()
        with recorded(root) as record:
            second = writer.save(2, mine(2), {}, wait=True).outcome
        assert first is not None and first.ok  # noqa: PT018
        assert second is not None and second.ok  # noqa: PT018
        record.save(ram / f"{rank}.json")

    run_ranks(save_as_rank, 2)
    before = contents(ram / "before")
    changes = merged(ram / "0.json", ram / "1.json")
    disk, seen = Disk(before), []
    for number, change in enumerate(changes):
        disk.apply(change)
        for pick in picks(disk, num_random=6, seed=number):
            laid_out(disk.after_a_crash(pick), ram / "after")
            checkpoint, _ = newest_verified(ram / "after" / "checkpoints")
            assert checkpoint is not None, (number, change)
            step = checkpoint.manifest.step
            got = {f"w.{rank}": torch.zeros(5) for rank in (0, 1)}
            load(checkpoint, got)
            assert all(torch.equal(tensor, torch.arange(5.0) * step) for tensor in got.values())
            seen.append(step)
            shutil.rmtree(ram / "after")
    assert set(seen) == {1, 2}
    assert seen[-1] == 2


def test_the_next_save_goes_through_and_clears_up_after_any_crash(ram: Path) -> None:
    root = ram / "run"
    save(root / "checkpoints", 1)
    before = contents(root)
    changes = save_recorded(root, 2, keep=1)
    disk = Disk(before)
    for number, change in enumerate(changes):
        disk.apply(change)
        for pick in itertools.islice(picks(disk, num_random=3, seed=number), 12):
            folder = ram / "after"
            laid_out(disk.after_a_crash(pick), folder)
            save(folder / "checkpoints", 3, keep=1)
            assert gone_on_from(folder / "checkpoints") == (3, 0)
            # What has lost its marker is nobody's, and stays; everything else of the crash is gone.
            stays = {path.parent.name for path in (folder / "checkpoints").rglob("*") if path.is_file()}
            for name in stays - {"checkpoints", "step-00000003"}:
                assert not (folder / "checkpoints" / name / "manifest.json").exists() or not is_owned(
                    folder / "checkpoints" / name
                )
            shutil.rmtree(folder)


def is_owned(folder: Path) -> bool:
    from triax.checkpoint.retain import owner

    return owner(folder) == "toy"


def test_the_model_of_a_disk_is_no_kinder_than_it_says(ram: Path) -> None:
    """Without its syncs the same save does lose the state, so the proofs above would see a sync that is missing."""
    root = ram / "run"
    save(root / "checkpoints", 1)
    before = contents(root)
    changes = [change for change in save_recorded(root, 2, keep=1) if change.kind != "sync"]
    disk, lost = Disk(before), 0
    for number, change in enumerate(changes):
        disk.apply(change)
        for pick in picks(disk, num_random=3, seed=number):
            laid_out(disk.after_a_crash(pick), ram / "after")
            lost += gone_on_from(ram / "after" / "checkpoints") == (0, 0)
            shutil.rmtree(ram / "after")
    assert lost > 10
    laid_out(disk.after_a_crash(newest), ram / "killed")
    assert contents(ram / "killed") == contents(root)
