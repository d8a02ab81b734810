"""Does a run go on by itself after a rank was killed, and stop where going on makes no sense?"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.typed import ended, losses, make_run, num_lines, started, triax, until, workers_of
from tests.harness.commands import Said, fork_workers
from tests.harness.commands import triax as triax_here
from triax.train.step import Stepper
from triax.watch.record import read_events

STEPS = 12

# Steps of some tens of milliseconds, so that a signal finds a run before its end.
SLOW: dict[str, Any] = {
    "model": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2},
    "data": {"seq_len": 64},
    "train": {"steps": STEPS, "sequences_per_step": 16},
    "checkpoint": {"every_steps": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the run file, and what the run comes to where nothing happens."""
    folder = tmp_path_factory.mktemp("recover")
    make_run(folder, **SLOW)
    told = ended(started(triax("train", "run.toml", "--ranks", 2, "--run-dir", "reference"), folder))
    assert told.code == 0, told
    return folder


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_costs_the_steps_since_the_checkpoint(rank: int, folder: Path) -> None:
    run_dir = folder / f"killed-{rank}"
    process = started(triax("train", "run.toml", "--ranks", 2, "--run-dir", run_dir, "-q"), folder)
    until(lambda: num_lines(run_dir / "metrics.jsonl") >= 6, process)
    os.kill(workers_of(process)[rank], signal.SIGKILL)
    told = ended(process)
    assert told.code == 0, told
    assert told.sentence.startswith(f"rank {rank} (dp_replicate={rank}) was killed by SIGKILL during ")
    assert told.sentence.endswith("All ranks go on from the checkpoint of step 4 (restart 1).")
    assert losses(run_dir) == losses(folder / "reference")
    events = read_events(run_dir)
    kinds = [event["kind"] for event in events if event["kind"] != "save"]
    assert kinds == ["start", "failure", "restart", "resume", "done"]
    (failure,) = (event for event in events if event["kind"] == "failure")
    assert (failure["rank"], failure["coordinate"]["dp_replicate"]) == (rank, rank)
    assert failure["detail"]["how"] == "was killed by SIGKILL"
    assert failure["step"] > 4
    (restart,) = (event for event in events if event["kind"] == "restart")
    assert (restart["rank"], restart["step"], restart["detail"]["number"]) == (None, 4, 1)


def test_a_file_stops_a_run_and_the_next_start_forgets_it(folder: Path) -> None:
    run_dir = folder / "stopped"
    words = triax("train", "run.toml", "--ranks", 2, "--run-dir", run_dir, "-q")
    process = started([*words, "train.steps=100000"], folder)
    until(lambda: num_lines(run_dir / "metrics.jsonl") >= 2, process)
    (run_dir / "stop").touch()
    told = ended(process)
    assert (told.code, "stopped after step" in told.sentence) == (75, True)
    told = ended(started(words, folder))
    assert (told.code, told.err, (run_dir / "stop").exists()) == (0, "", False)
    assert losses(run_dir)[:STEPS] == losses(folder / "reference")


def test_the_start_after_a_killed_one_waits_for_its_ranks(folder: Path) -> None:
    """As a scheduler does, which starts the same command again at once."""
    run_dir = folder / "twice"
    words = triax("train", "run.toml", "--ranks", 2, "--run-dir", run_dir, "-q")
    process = started(words, folder)
    until(lambda: num_lines(run_dir / "metrics.jsonl") >= 2, process)
    process.kill()
    told = ended(started(words, folder))
    assert (told.code, told.err) == (0, "")
    assert losses(run_dir) == losses(folder / "reference")
    assert "stopped after step" in ended(process).err


# Where ranks know what the test has patched


@pytest.fixture
def train(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[Callable[..., Said], list[int]]:
    make_run(tmp_path)
    starts = fork_workers(monkeypatch)
    words = ("train", str(tmp_path / "run.toml"), "--ranks", "2", "--run-dir", str(tmp_path / "run"), "-q")
    words = (*words, "checkpoint.background=false")  # whether one is finished before a fault must not be chance
    return lambda *more: triax_here([*words, *more], capfd), starts


def fails(at: int, fault: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``fault`` happen on rank 1 when the step of index ``at`` begins."""
    take = Stepper.take

    def faulty(self: Stepper, step: int, *args: Any, **kwargs: Any) -> Any:
        if step == at and os.environ["RANK"] == "1":
            fault()
        return take(self, step, *args, **kwargs)

    monkeypatch.setattr(Stepper, "take", faulty)


def test_a_fault_that_comes_back_ends_with_a_diagnosis(
    train: tuple[Callable[..., Said], list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ArithmeticError("seven")

    fails(3, fail, monkeypatch)
    said = train[0]()
    assert (said.code, train[1]) == (1, [2, 2])
    last = said.err.splitlines()[-1]
    assert last.startswith(
        "triax: rank 1 (dp_replicate=1) failed during step 3, end of the step: ArithmeticError: seven."
    )
    assert "2 times in a row at step 3 with no checkpoint gained between" in last
    kinds = [event["kind"] for event in read_events(tmp_path / "run")]
    assert [kind for kind in kinds if kind != "save"] == [
        "start", "failure", "restart", "resume", "failure", "given_up",
    ]  # fmt: skip


def test_bad_input_of_a_rank_is_not_tried_again(
    train: tuple[Callable[..., Said], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triax.errors import BadInput

    def fail() -> None:
        raise BadInput("what was asked cannot be.")

    fails(1, fail, monkeypatch)
    said = train[0]()
    assert (said.code, said.err, train[1]) == (2, "triax: what was asked cannot be.\n", [2])


def test_restarts_end_where_nothing_is_gained(
    train: tuple[Callable[..., Said], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(1, lambda: os.kill(os.getpid(), signal.SIGKILL), monkeypatch)
    said = train[0]("--max-restarts", "3", "recover.same_fault=100", "recover.backoff_s=0")
    assert (said.code, train[1]) == (1, [2] * 4)
    assert "3 restarts in a row have gained no checkpoint, and this is the limit." in said.err


def test_a_wish_to_stop_ends_a_pause(
    train: tuple[Callable[..., Said], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triax.cli import recover

    restart_after = recover.restart_after

    def restart_and_be_asked(*words: Any) -> Any:
        restart = restart_after(*words)
        if restart is not None and restart.number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return restart

    monkeypatch.setattr(recover, "restart_after", restart_and_be_asked)
    fails(1, lambda: os.kill(os.getpid(), signal.SIGKILL), monkeypatch)
    said = train[0]("recover.same_fault=100", "recover.backoff_s=1000", "recover.max_backoff_s=1000")
    assert (said.code, train[1]) == (75, [2, 2])
    assert "restart 2" in said.err
    assert said.err.splitlines()[-1].startswith("triax: stopped before a restart, as asked")
