"""Is somebody told when ranks die or the run gives up, and is the memory of the server free again then?"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.cli.test_recover import fails
from tests.cli.typed import make_run
from tests.harness.commands import Said, fork_workers, triax
from triax.checkpoint import memory_folder
from triax.train.step import Stepper
from triax.watch.record import read_events

Train = Callable[..., Said]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Keeps each alert as a line of ``alerts``."""
    path = tmp_path / "keep.py"
    path.write_text("import sys\nopen(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')\n")
    return path


@pytest.fixture
def train(tmp_path: Path, program: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Train:
    make_run(tmp_path, guard={"alert_command": [sys.executable, str(program), str(tmp_path / "alerts")]})
    fork_workers(monkeypatch)
    words = ("train", str(tmp_path / "run.toml"), "--ranks", "2", "--run-dir", str(tmp_path / "run"), "-q")

    def typed(*more: str) -> Said:
        said = triax([*words, *more], capfd)
        if dist.is_initialized():  # a rank alone is this process, and leaves it so where it fails
            dist.destroy_process_group()
        return said

    return typed


def alerts(folder: Path) -> list[dict[str, Any]]:
    path = folder / "alerts"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_each_death_and_the_end_of_the_budget_are_sent(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(1, die, monkeypatch)
    assert train("--max-restarts", "1", "recover.same_fault=9").code == 1
    sent = alerts(tmp_path)
    assert [(alert["kind"], alert["rank"], alert["step"]) for alert in sent] == [
        ("failure", 1, 1), ("failure", 1, 1), ("given_up", 1, 0),
    ]  # fmt: skip
    assert sent[0]["detail"]["reason"].startswith("rank 1 (dp_replicate=1) was killed by SIGKILL during step 1")
    assert "1 restarts in a row have gained no checkpoint" in sent[2]["detail"]["reason"]


def test_a_program_that_takes_its_time_delays_no_restart(
    train: Train, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the command alone waits for it."""
    over = tmp_path / "over"
    program.write_text(f"import time\ntime.sleep(3)\nopen({str(over)!r}, 'w').close()\n")
    first = tmp_path / "first"

    def die_once() -> None:
        if not first.exists():
            first.touch()
            die()

    fails(1, die_once, monkeypatch)
    assert train().code == 0
    (done,) = (event for event in read_events(tmp_path / "run") if event["kind"] == "done")
    assert done["time"] < over.stat().st_mtime


def test_a_rank_that_nobody_watches_sends_its_failure_itself(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Stepper, *args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("seven")

    monkeypatch.setattr(Stepper, "take", fail)
    assert train("--ranks", "1").code == 1
    (alert,) = alerts(tmp_path)
    assert (alert["kind"], alert["rank"]) == ("failure", 0)
    assert "ArithmeticError: seven" in alert["detail"]["reason"]


def test_bad_input_is_no_failure(train: Train, tmp_path: Path) -> None:
    assert train("--ranks", "1", "data.seq_len=100000").code == 2
    assert alerts(tmp_path) == []


# What ranks leave in the memory of a server


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_memory_is_free_again_when_a_run_has_given_up(
    ranks: str, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks are killed and can clear nothing; what another run keeps there stays."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv(memory_folder.PLACE, str(memory))
    seen = tmp_path / "seen"

    def end_where_something_is_held() -> None:
        found = list(memory.glob("triax-*/step-*/manifest.json"))
        if not found:
            return
        seen.write_text(str(found))
        if ranks == "2":
            die()
        raise ArithmeticError("seven")

    take = Stepper.take

    def faulty(self: Stepper, step: int, *args: Any, **kwargs: Any) -> Any:
        if step >= 3 and os.environ.get("RANK", "1") == "1":
            end_where_something_is_held()
        return take(self, step, *args, **kwargs)

    monkeypatch.setattr(Stepper, "take", faulty)
    words = ("--ranks", ranks, "--max-restarts", "0", "checkpoint.memory_every_steps=1", "checkpoint.every_steps=0")
    words = (*words, "train.steps=100000")
    other = memory / "triax-other-0"
    other.mkdir(mode=0o700)
    (other / "kept").touch()
    said = train(*words)
    assert (said.code, seen.exists()) == (1, True), said.err
    assert "manifest.json" in seen.read_text()
    assert list(memory.iterdir()) == [other]
    assert (other / "kept").exists()
