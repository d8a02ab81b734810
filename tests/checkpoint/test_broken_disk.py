"""Does a disk that fails, hangs, or lies at any one operation ever cost more than the save that it was asked for?"""

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.checkpoint.crash import NAMES
from tests.harness.ranks import run_ranks
from triax.checkpoint import operations
from triax.checkpoint.load import load
from triax.checkpoint.retain import owner
from triax.checkpoint.save import CheckpointWriter, SaveOutcome
from triax.checkpoint.verify import newest_verified


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(12, dtype=torch.float32) * step}


def save(writer: CheckpointWriter, step: int) -> SaveOutcome:
    outcome = writer.save(step, state(step), {}, wait=True).outcome
    assert outcome is not None
    return outcome


def newest(folder: Path) -> int:
    """The step that a restart would take, after its every bit was compared; 0 if there is none."""
    checkpoint, _ = newest_verified(folder)
    if checkpoint is None:
        return 0
    got = {"w": torch.zeros(12)}
    load(checkpoint, got)
    assert torch.equal(got["w"], state(checkpoint.manifest.step)["w"])
    return checkpoint.manifest.step


@contextmanager
def disturbed(happens: Callable[[int, str], bool], instead: Callable[..., Any]) -> Iterator[list[str]]:
    """Do ``instead`` in the place of those operations for which ``happens(number, name)``; yields what was asked."""
    asked: list[str] = []

    def disturb(name: str) -> Callable[..., Any]:
        original = getattr(operations, name)

        def do(*args: Any) -> Any:
            number = len(asked)
            asked.append(name)
            return instead(original, *args) if happens(number, name) else original(*args)

        return do

    with patch.multiple(operations, **{name: disturb(name) for name in NAMES}):
        yield asked


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("is_lasting", [False, True], ids=["once", "from then on"])
def test_an_error_at_each_operation_in_turn_costs_one_save(code: int, is_lasting: bool, ram: Path) -> None:
    ends, number = [], 0
    while True:
        folder = ram / str(number)
        writer = CheckpointWriter(folder, keep=1, run="toy")
        assert save(writer, 1).ok
        at = number
        with disturbed(lambda n, _, at=at: n == at or (is_lasting and n > at), failing(code)) as asked:
            outcome = save(writer, 2)
        # What was named already and cannot be removed either is a whole state of step 2 all the same.
        is_open = "could not be removed either" in outcome.reason
        assert newest(folder) in ({1, 2} if is_open else {2 if outcome.ok else 1}), (number, outcome)
        if number < len(asked):
            assert outcome.reason != "", number  # said, whether or not the checkpoint is whole
        ends.append(outcome.ok)
        # The disk is well again.
        assert save(writer, 3).ok
        assert newest(folder) == 3
        left = {path.name for path in folder.iterdir()} - {"latest", "step-00000003"}
        # A folder that a lasting failure has kept from being marked, and from being removed again, is nobody's.
        assert all(owner(folder / name) is None and is_lasting for name in left), number
        if number >= len(asked):
            break
        number += 1
    assert number > 15
    assert ends == sorted(ends), "what fails before the commit costs the save, what fails after it does not"


def test_an_error_on_any_one_rank_is_the_same_outcome_on_all(tmp_path: Path) -> None:
    def train(rank: int, world: int) -> list[str]:
        def mine(step: int) -> dict[str, torch.Tensor]:
            return {f"w.{rank}": torch.arange(5.0) * step}

        said = []
        for number in range(6):
            writer = CheckpointWriter(tmp_path / str(number), run="toy")
            first = writer.save(1, mine(1), {}, wait=True).outcome
            assert first is not None
            assert first.ok
            with disturbed(lambda n, _, at=number: rank == 1 and n == at, failing(errno.EIO)):
                second = writer.save(2, mine(2), {}, wait=True).outcome
            assert second is not None
            assert not second.ok
            said.append(second.reason)
            checkpoint, _ = newest_verified(tmp_path / str(number))
            assert checkpoint is not None
            assert checkpoint.manifest.step == 1
            third = writer.save(3, mine(3), {}, wait=True).outcome
            assert third is not None
            assert third.ok
        return said

    first, second = run_ranks(train, 2)
    assert first == second
    assert all("rank 1 could not write" in reason and "input/output error" in reason for reason in first)


def test_a_rename_that_is_lost_costs_the_save_and_no_older_checkpoint(tmp_path: Path) -> None:
    """A file system that says yes and does nothing: older checkpoints must not go in the belief that this one is."""
    for number in range(3):  # of the part file, of the manifest, of `latest`
        folder = tmp_path / str(number)
        writer = CheckpointWriter(folder, keep=1, run="toy", patience_s=0.2)
        assert save(writer, 1).ok
        renames = iter(range(100))
        is_lost = iter(lambda renames=renames, number=number: next(renames) == number, None)
        with disturbed(lambda _, name, is_lost=is_lost: name == "rename" and next(is_lost), lambda *_: None):
            outcome = save(writer, 2)
        assert newest(folder) == (2 if outcome.ok else 1)
        assert outcome.ok == (number == 2)
        assert save(writer, 3).ok
        assert newest(folder) == 3


@pytest.mark.parametrize("name", [*NAMES])
def test_a_disk_that_hangs_at_any_kind_of_operation_never_holds_up_training(name: str, tmp_path: Path) -> None:
    well = threading.Event()
    folder = tmp_path / "checkpoints"
    writer = CheckpointWriter(folder, keep=1, run="toy", patience_s=0.2)
    assert save(writer, 1).ok
    hung = threading.Event()

    def hang(original: Callable[..., Any], *args: Any) -> Any:
        hung.set()
        well.wait()
        return original(*args)

    with disturbed(lambda _, asked: asked == name and not well.is_set(), hang):
        stalls = []
        for step in (2, 3, 4, 5):
            began_s = time.monotonic()
            handle = writer.save(step, state(step), {})
            stalls.append(time.monotonic() - began_s)
            hung.wait(5)
            assert handle.outcome is None or not handle.outcome.ok
        assert newest(folder) in (1, 2)  # 2: what hangs is the tidying after the commit
        # Once the patience is over for the first that hangs, no later save waits for it again.
        assert max(stalls) < 3
        assert sum(stalls[2:]) < 0.3
        well.set()
        outcome = writer.finish(20)
    assert outcome is None or outcome.ok, outcome
    deadline_s = time.monotonic() + 20
    while not (outcome := save(writer, 6)).ok and time.monotonic() < deadline_s:
        assert "does not answer" in outcome.reason
    assert outcome.ok
    assert newest(folder) == 6


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own; needs the right to mount one."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a file system here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is Linux")
def test_a_disk_that_turns_read_only_is_survived(mounted: Path) -> None:
    writer = CheckpointWriter(mounted, keep=1, run="toy")
    assert save(writer, 1).ok
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    outcome = save(writer, 2)
    assert not outcome.ok
    assert "read-only file system" in outcome.reason
    assert newest(mounted) == 1
    subprocess.run(["mount", "-o", "remount,rw", mounted], check=True)
    assert save(writer, 3).ok
    assert newest(mounted) == 3
