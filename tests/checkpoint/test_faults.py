"""Does a save that goes wrong leave training and older checkpoints alone, and is nothing damaged ever loaded?"""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import run_ranks
from triax.checkpoint import commit, disk, part, save, verify
from triax.checkpoint.load import load
from triax.checkpoint.save import CheckpointWriter, SaveOutcome
from triax.checkpoint.verify import find_checkpoints, newest_verified, verified
from triax.errors import BadInput


def state(step: int) -> dict[str, torch.Tensor]:
    """The state after a step: other bits at every step."""
    return {"w": torch.arange(40, dtype=torch.float32) * step, "n": torch.tensor(step)}


def save_now(writer: CheckpointWriter, step: int) -> SaveOutcome:
    outcome = writer.save(step, state(step), {"step": step}, wait=True).outcome
    assert outcome is not None
    assert outcome.step == step
    return outcome


def newest(folder: Path) -> tuple[int, list[str]]:
    """The step of the checkpoint that a restart would take, after its every bit was compared; 0 if there is none."""
    checkpoint, passed_over = newest_verified(folder)
    if checkpoint is None:
        return 0, passed_over
    step = checkpoint.manifest.step
    got = {name: torch.zeros_like(tensor) for name, tensor in state(step).items()}
    load(checkpoint, got)
    assert all(torch.equal(got[name], tensor) for name, tensor in state(step).items())
    return step, passed_over


def failing(error: int, on_rank: int = 0) -> Callable[..., Any]:
    """What a disk says that fails on one rank."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(error, os.strerror(error))

    return lambda original: (
        lambda *args, **kw: fail() if int(os.environ.get("RANK", "0")) == on_rank else original(*args, **kw)
    )


@pytest.mark.parametrize(
    ("where", "name", "rank", "says"),
    [
        (part, "write_new", 1, "rank 1 could not write shard-00001-of-00003.safetensors: no space left on device"),
        (part, "write_new", 0, "rank 0 could not write shard-00000-of-00003.safetensors: no space left on device"),
        (save, "deliver", 2, "rank 2 could not write shard-00002-of-00003.safetensors: no space left on device"),
        (
            commit,
            "write_manifest",
            0,
            "rank 0 could not write shard-00000-of-00003.safetensors: no space left on device",
        ),
        (save, "begin_folder", 0, "step-00000002 cannot be made: no space left on device"),
        (save, "remove_unfinished", 0, "step-00000002 cannot be made: no space left on device"),
    ],
)
def test_a_disk_that_fails_at_any_place_on_any_rank_is_an_outcome_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, rank: int, says: str
) -> None:
    def train(rank_here: int, world: int) -> list[str]:
        # Three ranks, each with something of its own to write.
        def mine(step: int) -> dict[str, torch.Tensor]:
            return {f"w.{rank_here}": torch.arange(50) * step}

        writer = CheckpointWriter(tmp_path, run="toy")
        first = writer.save(1, mine(1), {}, wait=True).outcome
        with monkeypatch.context() as patch:
            patch.setattr(where, name, failing(errno.ENOSPC, rank)(getattr(where, name)))
            second = writer.save(2, mine(2), {}, wait=True).outcome
        assert first is not None
        assert second is not None
        assert first.ok
        assert not second.ok
        assert second.bytes == 0
        checkpoint, _ = newest_verified(tmp_path)
        assert checkpoint is not None
        assert checkpoint.manifest.step == 1
        third = writer.save(3, mine(3), {}, wait=True).outcome
        assert third is not None
        assert third.ok
        return [second.reason]

    (reason, *others) = [reasons[0] for reasons in run_ranks(train, 3)]
    assert reason.endswith(says)
    assert others == [reason, reason]
    assert [found.step for found in find_checkpoints(tmp_path)] == [3, 1]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of one MiB; needs the right to mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is Linux")
def test_a_full_disk_is_foreseen_and_if_not_survived(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = CheckpointWriter(small_disk, run="toy")
    large = state(2) | {"large": torch.zeros(1 << 20)}
    assert save_now(writer, 1).ok
    foreseen = writer.save(2, large, {}).outcome
    assert foreseen is not None
    assert not foreseen.ok
    assert foreseen.reason.startswith("disk full: it needs 4.00 MiB in ")
    monkeypatch.setattr(save, "free_bytes", lambda folder: 1 << 40)
    survived = writer.save(2, large, {}, wait=True).outcome
    assert survived is not None
    assert "no space left on device" in survived.reason
    assert newest(small_disk) == (1, [])
    assert [found.step for found in find_checkpoints(small_disk)] == [1]
    assert save_now(writer, 3).ok


def test_files_that_never_appear_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "deliver", lambda ticket, rank, file: None)
    writer = CheckpointWriter(tmp_path, run="toy", patience_s=0.2)
    outcome = save_now(writer, 1)
    assert not outcome.ok
    assert "never appeared" in outcome.reason
    assert find_checkpoints(tmp_path) == []


def test_parts_of_an_interrupted_save_are_not_taken_for_those_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver = save.deliver
    stale = commit.Ticket(1, tmp_path / "step-00000001", "another")
    monkeypatch.setattr(save, "deliver", lambda ticket, rank, file: deliver(stale, rank, file))
    outcome = save_now(CheckpointWriter(tmp_path, run="toy", patience_s=0.2), 1)
    assert "never appeared" in outcome.reason


def test_a_slow_disk_makes_saves_rarer_and_never_stops_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    write_new = part.write_new
    monkeypatch.setattr(part, "write_new", lambda *args: goes_on.wait() and write_new(*args))
    writer = CheckpointWriter(tmp_path, run="toy", patience_s=0.1)
    assert writer.save(1, state(1), {}).outcome is None
    skipped = writer.save(2, state(2), {}).outcome
    assert skipped is not None
    assert skipped.reason == "skipped, because step 1 is still being written after 100 ms"
    assert writer.poll() is None
    goes_on.set()
    outcome = writer.finish()
    assert outcome is not None
    assert (outcome.step, outcome.ok) == (1, True)
    assert newest(tmp_path) == (1, [])
    assert save_now(writer, 3).ok


def test_what_fails_after_the_commit_does_not_undo_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "point_latest", failing(errno.EROFS)(commit.point_latest))
    monkeypatch.setattr(commit, "prune", lambda *_: 1 // 0)
    outcome = save_now(CheckpointWriter(tmp_path, run="toy"), 1)
    assert outcome.ok
    assert "`latest` could not be written: read-only file system" in outcome.reason
    assert "division" in outcome.reason
    assert newest(tmp_path) == (1, [])


def test_a_fault_in_the_code_is_an_outcome_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = CheckpointWriter(tmp_path, run="toy")
    assert save_now(writer, 1).ok
    with monkeypatch.context() as patch:
        patch.setattr(save, "commit", lambda *_: 1 // 0)
        assert "ZeroDivisionError" in save_now(writer, 2).reason
    with monkeypatch.context() as patch:
        patch.setattr(part.Part, "copy", lambda *_, **__: torch.empty(2**62))
        assert "host memory" in save_now(writer, 2).reason
    assert newest(tmp_path) == (1, [])


@pytest.mark.parametrize("extra", [{"loss": float("nan")}, {"path": Path()}, {"tensor": torch.ones(1)}])
def test_extra_that_is_not_json_is_an_outcome(tmp_path: Path, extra: dict[str, Any]) -> None:
    outcome = CheckpointWriter(tmp_path, run="toy").save(1, state(1), extra).outcome
    assert outcome is not None
    assert "not made of JSON values" in outcome.reason
    assert find_checkpoints(tmp_path) == []


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    with pytest.raises(BadInput, match=r"file cannot be|cannot be written to .*file"):
        CheckpointWriter(in_the_way, run="toy")
    with pytest.raises(BadInput, match="cannot be listed"):
        newest_verified(in_the_way)
    with pytest.raises(BadInput, match="keep at least 1"):
        CheckpointWriter(tmp_path, keep=0, run="toy")
    assert newest_verified(tmp_path / "nothing") == (None, [])
    # The folder goes away while training runs.
    folder = tmp_path / "checkpoints"
    writer = CheckpointWriter(folder, run="toy")
    assert save_now(writer, 1).ok
    folder.rename(tmp_path / "elsewhere")
    folder.write_text("not a folder")
    assert "not a directory" in save_now(writer, 2).reason
    assert newest(tmp_path / "elsewhere") == (1, [])


@pytest.fixture
def two_saves(tmp_path: Path) -> Path:
    """Checkpoints of step 1 and step 2."""
    writer = CheckpointWriter(tmp_path, run="toy")
    assert save_now(writer, 1).ok
    assert save_now(writer, 2).ok
    assert newest(tmp_path) == (2, [])
    return tmp_path


def files_of(folder: Path) -> list[Path]:
    return [path for path in sorted((folder / "step-00000002").iterdir()) if path.name != "written-by.json"]


def test_a_flipped_bit_anywhere_in_any_file_is_found(two_saves: Path) -> None:
    for path in files_of(two_saves):
        good = path.read_bytes()
        for position in range(len(good)):
            path.write_bytes(good[:position] + bytes([good[position] ^ 1 << position % 8]) + good[position + 1 :])
            step, passed_over = newest(two_saves)
            assert step == 1
            assert len(passed_over) == 1
            assert "step-00000002" in passed_over[0]
        path.write_bytes(good)
    assert newest(two_saves) == (2, [])


def test_a_file_torn_at_any_length_is_found(two_saves: Path) -> None:
    for path in files_of(two_saves):
        good = path.read_bytes()
        for length in range(len(good)):
            path.write_bytes(good[:length])
            step, passed_over = newest(two_saves)
            assert step == 1
            assert len(passed_over) == 1
        path.write_bytes(good + b"\0")
        assert newest(two_saves)[0] == 1
        path.write_bytes(good)


@pytest.mark.parametrize("missing", ["manifest.json", "shard-00000-of-00001.safetensors"])
@pytest.mark.parametrize("instead", ["nothing", "folder", "pipe", "link to nothing"])
def test_a_missing_file_or_one_that_is_none_is_passed_over(two_saves: Path, missing: str, instead: str) -> None:
    path = two_saves / "step-00000002" / missing
    path.unlink()
    if instead == "folder":
        path.mkdir()
    elif instead == "pipe":
        os.mkfifo(path)
    elif instead == "link to nothing":
        path.symlink_to("nothing")
    step, passed_over = newest(two_saves)
    assert step == 1
    assert len(passed_over) == 1
    assert "step-00000002" in passed_over[0]


def test_damage_is_agreed_on_by_all_ranks(tmp_path: Path) -> None:
    def save_and_tear(rank: int, world: int) -> tuple[list[str], str]:
        writer = CheckpointWriter(tmp_path, run="toy")
        for step in (1, 2):
            writer.save(step, {f"w.{rank}": torch.arange(9) * step}, {}, wait=True)
        if rank == 2:
            torn = tmp_path / "step-00000002" / "shard-00001-of-00003.safetensors"
            torn.write_bytes(torn.read_bytes()[:-1])
        torch.distributed.barrier()
        checkpoint, passed_over = newest_verified(tmp_path)
        with pytest.raises(BadInput) as raised:
            verified(tmp_path / "step-00000002")
        assert checkpoint is not None
        assert checkpoint.manifest.step == 1
        return passed_over, str(raised.value)

    results = run_ranks(save_and_tear, 3)
    assert results == [results[0]] * 3
    passed_over, said = results[0]
    assert passed_over == [said]
    assert "is damaged: shard-00001-of-00003.safetensors has " in said


def test_only_damaged_checkpoints_make_a_folder_suspect(two_saves: Path) -> None:
    for name in ("step-00000001", "step-00000002"):
        (two_saves / name / "manifest.json").unlink()
    assert newest(two_saves) == (0, [])
    (two_saves / "step-00000002" / "manifest.json").write_text("{}")
    step, passed_over = newest(two_saves)
    assert step == 0
    assert len(passed_over) == 1


def test_a_folder_that_cannot_be_looked_into_hides_no_other(two_saves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists, is_denied = Path.exists, two_saves / "step-00000002" / "manifest.json"

    def denied(path: Path) -> bool:
        if path == is_denied:
            raise PermissionError(errno.EACCES, "permission denied")
        return exists(path)

    monkeypatch.setattr(Path, "exists", denied)
    monkeypatch.setattr(verify, "read_small", lambda path, most: denied(path) and disk.read_small(path, most))
    step, passed_over = newest(two_saves)
    assert step == 1
    assert passed_over == [f"{is_denied} cannot be read: permission denied."]


def test_the_files_are_on_the_disk_before_the_manifest_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure only what was synced is there; the manifest may not be there without its files."""
    synced: list[str] = []
    fsync = os.fsync

    def remember(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(disk.os, "fsync", remember)
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to see which file was synced")
    assert save_now(CheckpointWriter(tmp_path / "c", run="toy"), 1).ok
    order = [
        synced.index(name) for name in ("shard-00000-of-00001.safetensors", "step-00000001", "c", "manifest.json.tmp")
    ]
    assert order == sorted(order)
    assert "written-by.json" in synced[: order[-1]]
    assert synced.index("step-00000001", order[-1]) > order[-1]  # the rename itself


def crash_at(folder: Path, event_number: int) -> bool:
    """Save step 2 in a process of its own that is killed just before its n-th change to the folder; False if it has
    fewer. The audit events of Python are its system calls on names; a file may also be torn, which is tested above."""
    pid = os.fork()
    if pid == 0:
        seen = 0

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal seen
            is_write = event == "open" and isinstance(args[2], int) and args[2] & (os.O_CREAT | os.O_WRONLY)
            if (is_write or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir")) and str(folder) in str(
                args[0]
            ):
                if seen == event_number:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        try:
            writer = CheckpointWriter(folder, keep=1, run="toy")
            sys.addaudithook(hook)
            os._exit(0 if save_now(writer, 2).ok else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    steps = []
    event_number = 0
    while True:
        folder = tmp_path / str(event_number)
        assert save_now(CheckpointWriter(folder, run="toy"), 1).ok
        was_killed = crash_at(folder, event_number)
        steps.append(newest(folder)[0])
        # And the next save goes through, tidies up, and is the only one left of two histories.
        assert save_now(CheckpointWriter(folder, keep=1, run="toy"), 3).ok
        assert newest(folder) == (3, [])
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000003"]
        event_number += 1
        if not was_killed:
            break
    assert steps == sorted(steps), "the commit is one moment"
    assert set(steps) == {1, 2}
    assert event_number > 12
