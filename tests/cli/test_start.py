"""Does one command start ranks, go on after whatever ended them, and train the same bits however it is started?"""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.typed import (
    Told,
    Typed,
    copied,
    ended,
    is_gone,
    losses,
    make_run,
    num_lines,
    shell,
    started,
    torchrun,
    triax,
    until,
    workers_of,
)
from triax.checkpoint.verify import find_checkpoints, newest_verified
from triax.errors import BadInput
from triax.train.run_folder import RunFolder

STEPS = 16

# Steps of some tens of milliseconds, so that a signal finds a run before its end.
SLOW: dict[str, Any] = {
    "model": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2},
    "data": {"seq_len": 64},
    "train": {"steps": STEPS, "sequences_per_step": 16},
    "checkpoint": {"every_steps": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the run file, and tokens once they are made."""
    folder = tmp_path_factory.mktemp("start")
    make_run(folder, **SLOW)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[Told, Path]:
    """What ``triax train --ranks 2`` said, and its run's folder."""
    told = ended(started(triax("train", "run.toml", "--ranks", 2, "--run-dir", "reference"), folder))
    assert told.code == 0, told
    return told, folder / "reference"


def test_ranks_train_and_say_so_in_plain_lines(reference: tuple[Told, Path]) -> None:
    told, run_dir = reference
    assert told.err == ""
    assert told.out.replace("\n", "").isprintable()
    lines = told.out.splitlines()
    assert "dp_replicate=2" in lines[1]
    assert [line.split()[1] for line in lines if line.startswith("step:")] == [str(step + 1) for step in range(STEPS)]
    assert lines[-1].startswith(f"done: {STEPS} steps")
    assert sorted(path.name for path in run_dir.iterdir() if not path.name.startswith(".")) == [
        "checkpoints", "cluster.toml", "events.jsonl", "metrics.jsonl", "plan.json", "resolved.toml", "run.toml",
    ]  # fmt: skip
    assert (run_dir / "run.toml").read_text() == (run_dir.parent / "run.toml").read_text()
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < line["throughput/device/mfu"] < 1 for line in metrics)


def test_stopped_killed_and_gone_on(folder: Path, reference: tuple[Told, Path]) -> None:
    """SIGTERM saves and asks to be started again; a rank killed outright is named; the same command ends the run."""
    run_dir = folder / "interrupted"
    words = triax("train", "run.toml", "--ranks", 2, "--run-dir", "interrupted")

    stopped = started(words, folder)
    until(lambda: num_lines(run_dir / "metrics.jsonl") >= 2, stopped)
    # As schedulers send it, to every process of the group; and somebody presses Ctrl-C, twice.
    os.killpg(stopped.pid, signal.SIGTERM)
    for _ in range(2):
        time.sleep(0.05)
        os.killpg(stopped.pid, signal.SIGINT)
    told = ended(stopped)
    assert told.code == 75
    match = re.fullmatch(rf"stopped after step (\d+) of {STEPS} as asked, state saved; .*", told.sentence)
    assert match is not None, told.sentence
    step = int(match[1])
    newest, passed_over = newest_verified(run_dir / "checkpoints")
    assert newest is not None
    assert (newest.manifest.step, passed_over) == (step, [])

    # With nothing between its steps, so that it is killed in one.
    steps_only = ("checkpoint.every_steps=0", "guard.hash_every_steps=0", "eval.every_steps=0")
    killed = started([*words, "train.steps=100000", *steps_only, "--max-restarts", "0"], folder)
    until(lambda: num_lines(run_dir / "metrics.jsonl") > step + 4, killed)
    os.kill(workers_of(killed)[1], signal.SIGKILL)
    told = ended(killed)
    assert told.code == 1
    said = told.sentence
    assert re.match(r"rank 1 \(dp_replicate=1\) was killed by SIGKILL during step ", said), said

    # Also where nobody listens: what is closed here must not be taken for an output by a rank.
    told = ended(started(shell("triax train run.toml --ranks 2 --run-dir interrupted >&- 2>&-"), folder))
    assert (told.code, told.out, told.err) == (0, "", "")
    assert losses(run_dir)[:STEPS] == losses(reference[1])


def test_ranks_follow_a_start_that_was_killed(folder: Path, reference: tuple[Told, Path]) -> None:
    """They save what they have, hold the folder meanwhile, and are gone then."""
    run_dir = folder / "orphaned"
    process = started(
        triax("train", "run.toml", "train.steps=100000", "--ranks", 2, "--run-dir", "orphaned", "-q"), folder
    )
    until(lambda: num_lines(run_dir / "metrics.jsonl") >= 2, process)
    workers = workers_of(process)
    assert len(workers) == 2
    process.kill()
    process.wait()

    def can_start() -> bool:
        try:
            with RunFolder(run_dir).locked():
                return True
        except BadInput:
            return False

    until(can_start)
    newest, _ = newest_verified(run_dir / "checkpoints")
    assert newest is not None
    assert newest.manifest.step == num_lines(run_dir / "metrics.jsonl")
    until(lambda: all(map(is_gone, workers)), timeout_s=30)
    assert "stopped after step" in ended(process).err


def test_torchrun_starts_the_same_run(folder: Path, reference: tuple[Told, Path]) -> None:
    words = ("--standalone", "--nproc-per-node", 2, "-m", "triax", "train", "run.toml", "--run-dir", "torchrun")
    told = ended(started(torchrun(*words), folder))
    assert told.code == 0, told
    assert "Traceback" not in told.err
    assert losses(folder / "torchrun") == losses(reference[1])


def test_two_servers_train_the_same_run(folder: Path, reference: tuple[Told, Path]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "127.0.0.1", "--master-port", port)
    servers = [
        started(torchrun(*words, "--node-rank", node, "-m", "triax", "train", "run.toml", "--run-dir", "two"), folder)
        for node in range(2)
    ]
    told = [ended(server) for server in servers]
    assert [one.code for one in told] == [0, 0], told
    assert losses(folder / "two") == losses(reference[1])
    assert json.loads((folder / "two" / "plan.json").read_text())["cluster"]["servers"] == 2


# What needs no ranks of its own


@pytest.fixture
def again(folder: Path, reference: tuple[Told, Path], tmp_path: Path) -> Path:
    """A copy of the finished run that belongs to the test, beside the same run file."""
    (tmp_path / "run.toml").write_bytes((folder / "run.toml").read_bytes())
    (tmp_path / "corpus.jsonl").write_bytes((folder / "corpus.jsonl").read_bytes())
    return copied(reference[1], tmp_path / "run")


def test_a_run_that_is_complete_says_so(again: Path, here: Typed) -> None:
    before = num_lines(again / "metrics.jsonl")
    for words, asked in (((), STEPS), (("train.steps=5",), 5)):
        told = here("train", "run.toml", "--ranks", 1, "--run-dir", "run", *words)
        assert (told.code, told.err) == (0, "")
        assert f"complete: {STEPS} steps were trained before, and train.steps={asked} asks for no more" in told.out
    assert num_lines(again / "metrics.jsonl") == before
    assert here("train", "run.toml", "--ranks", 1, "--run-dir", "run", f"train.steps={STEPS + 1}", "-q").code == 0
    assert len(losses(again)) == STEPS + 1


def test_a_plan_trains_as_it_is(tmp_path: Path, here: Typed) -> None:
    make_run(tmp_path)
    assert here("train", "run.toml", "train.seed=3", "--ranks", 1, "--run-dir", "first", "-q").code == 0
    plan = (tmp_path / "first" / "plan.json").read_bytes()
    (tmp_path / "plan.json").write_bytes(plan)
    assert here("train", "plan.json", "-q").code == 0
    assert losses(tmp_path / "runs" / "plan") == losses(tmp_path / "first")
    assert (tmp_path / "runs" / "plan" / "plan.json").read_bytes() == plan
    # In the folder of a run it means that run.
    told = here("train", "first/plan.json")
    assert (told.code, "complete: 4 steps" in told.out) == (0, True)


@pytest.fixture
def stubborn() -> Iterator[None]:
    """A process that would survive a signal that no command handles."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_before_the_first_step_loses_nothing(
    number: signal.Signals, tmp_path: Path, here: Typed, monkeypatch: pytest.MonkeyPatch, stubborn: None
) -> None:
    def asked_to_stop(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), number)

    make_run(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("triax.cli.start.tokens_of", asked_to_stop)
        told = here("train", "run.toml", "--ranks", 1, "--run-dir", "run")
    assert (told.code, told.out) == (75, "")
    assert "stopped before the first step, as asked" in told.sentence
    assert here("train", "run.toml", "--ranks", 1, "--run-dir", "run", "-q").code == 0
    assert [found.step for found in find_checkpoints(tmp_path / "run" / "checkpoints")] == [4, 2]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_one_rank_is_stopped_like_many(
    tmp_path: Path, here: Typed, monkeypatch: pytest.MonkeyPatch, stubborn: None
) -> None:
    from triax.train.step import Stepper

    take = Stepper.take

    def take_and_be_asked(self: Stepper, step: int, *args: Any, **kwargs: Any) -> Any:
        if step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return take(self, step, *args, **kwargs)

    make_run(tmp_path)
    monkeypatch.setattr(Stepper, "take", take_and_be_asked)
    told = here("train", "run.toml", "--ranks", 1, "--run-dir", "run", "-q")
    assert told.code == 75
    assert told.sentence.startswith("stopped after step 4 of 4") or told.sentence.startswith(
        "stopped after step 3 of 4"
    )
    assert here("train", "run.toml", "--ranks", 1, "--run-dir", "run", "-q").code == 0
    assert len(losses(tmp_path / "run")) == 4


def test_an_ignored_hang_up_stays_ignored(tmp_path: Path, here: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``nohup`` a terminal may go away."""
    from triax.train.step import Stepper

    take = Stepper.take

    def take_and_hang_up(self: Stepper, step: int, *args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGHUP)
        return take(self, step, *args, **kwargs)

    make_run(tmp_path)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(Stepper, "take", take_and_hang_up)
        assert here("train", "run.toml", "--ranks", 1, "--run-dir", "run", "-q").code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("prompt", ["", "alpha", "ünï😀", "lorem " * 20_000, "\0\x1b[31m"], ids=range(5))
def test_any_prompt_is_gone_on_from(prompt: str, again: Path, here: Typed) -> None:
    told = here("generate", "run", "--prompt", prompt, "--max-tokens", 3, "--temperature", 1e-300)
    assert (told.code, told.err) == (0, "")
    assert told.out.startswith(prompt)


def test_a_prompt_that_is_no_text(again: Path, here: Typed) -> None:
    told = here("generate", "run", "--prompt", "a\udcff")
    assert (told.code, told.out) == (2, "")
    assert "the prompt is not UTF-8 text: its character 2" in told.sentence


def test_a_network_that_cannot_write(again: Path, here: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    from triax.nn.decoder import Decoder

    forward = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs) * float("nan"))
    told = here("generate", "run", "--prompt", "a")
    assert told.code == 1
    assert "numbers that are not finite" in told.sentence


def test_a_reader_that_goes_away_is_no_failure(again: Path) -> None:
    process = started(triax("config", "show", "run.toml"), again.parent)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert (process.wait(60), process.stderr.read()) == (0, "")
    process.stderr.close()


def test_closed_outputs_are_no_failure(again: Path) -> None:
    told = ended(started(shell("triax config show run.toml >&- 2>&-"), again.parent))
    assert (told.code, told.out, told.err) == (0, "", "")


def test_a_full_output_is_told(again: Path) -> None:
    told = ended(started(shell("triax config show run.toml >/dev/full"), again.parent))
    assert told.code == 1
    assert "No space left on device" in told.sentence
