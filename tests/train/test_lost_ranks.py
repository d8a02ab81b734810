"""Is a rank that is killed, aborts, fails or never answers named in one line, with its place and what it was doing?"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.harness.commands import Said, be_worker, fork_workers, free_port, triax
from triax.parallel import collectives
from triax.spec.cluster import Cluster
from triax.spec.load import load_run
from triax.spec.plan import make_plan
from triax.spec.resolve import resolve_layout
from triax.train.order import Order, work
from triax.train.step import Stepper

RUN = """
[model]
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 2
vocab_size = 257

[data]
train = ["corpus.txt"]
seq_len = 16
cache_dir = "cache"

[train]
steps = 3
sequences_per_step = 4
timeout_s = 2.0

[precision]
compute = "fp32"

[guard]
check_initial_loss = false

[watch]
tensorboard = false

[layout]
microbatches = 2
"""
GO_ON = "Start the same command again to go on from the newest checkpoint."


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "corpus.txt").write_text("to be or not to be that is the question " * 100)
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def on_rank(rank: int, fault: Callable[[], None], monkeypatch: pytest.MonkeyPatch, step: int = 1) -> None:
    """Let ``fault`` happen on ``rank`` when the step of index ``step`` begins."""
    accumulate = Stepper.accumulate

    def faulty(self: Stepper, at: int, *args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == str(rank) and at == step:
            fault()
        return accumulate(self, at, *args, **kwargs)

    monkeypatch.setattr(Stepper, "accumulate", faulty)


@pytest.fixture
def train(run_file: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Said]:
    fork_workers(monkeypatch)
    folder = str(run_file.parent / "run")
    return lambda layout: triax(
        ["train", str(run_file), "--ranks", "4", "--layout", layout, "--run-dir", folder, "--max-restarts", "0", "-q"],
        capfd,
    )


def test_a_rank_that_never_answers_is_named_by_those_that_waited(
    train: Callable[[str], Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_rank(1, lambda: time.sleep(60), monkeypatch)
    begun_s = time.monotonic()
    said = train("pp=2 tp=2")
    (line,) = said.err.strip().splitlines()
    assert said.code == 1
    assert "had no answer from a peer for 2.0 s during step 2, " in line
    assert "; rank 1 (pp=0 tp=1) stood still in step 1, end of the step. " + GO_ON in line
    assert time.monotonic() - begun_s < 40


def test_a_killed_rank_is_named(train: Callable[[str], Said], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others only lose it, and say nothing."""
    on_rank(3, lambda: os.kill(os.getpid(), signal.SIGKILL), monkeypatch)
    said = train("pp=2 tp=2")
    assert said.code == 1
    assert said.err == (
        "triax: rank 3 (pp=1 tp=1) was killed by SIGKILL during step 1, end of the step (so a system ends a process "
        f"that takes its last memory). {GO_ON}\n"
    )


def test_an_error_of_one_rank_is_told_once_with_what_it_was_doing(
    train: Callable[[str], Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ArithmeticError("seven")

    on_rank(2, fail, monkeypatch)
    said = train("pp=2 dp_shard=2")
    assert said.code == 1
    assert said.err.startswith(
        "triax: rank 2 (pp=1 dp_shard=0) failed by what nobody foresaw during step 1, end of the step:\nTraceback"
    )
    assert said.err.rstrip().endswith("ArithmeticError: seven")
    assert said.err.count("triax: ") == 1


def test_a_collective_whose_sizes_differ_is_named(
    train: Callable[[str], Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo ends the process of the rank that receives too much; the last line says where that was."""
    gathered = collectives.gathered
    calls = []

    def shorter(part_BSD: Tensor, group: Any) -> Tensor:
        calls.append(1)
        is_wrong = os.environ["RANK"] == "1" and len(calls) == 20
        return gathered(part_BSD[:, :-1] if is_wrong else part_BSD, group)

    monkeypatch.setattr(collectives, "gathered", shorter)
    said = train("pp=2 tp=2")
    last = said.err.strip().splitlines()[-1]
    assert said.code == 1
    assert last.startswith("triax: rank ")
    assert "(pp=0 tp=" in last
    assert "was killed by SIGABRT during step" in last
    assert "ward of stage 0, microbatch" in last or "gradients of stage 0" in last


def test_ranks_that_never_come_are_not_waited_for_longer_than_said(
    run_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As under torchrun on several servers, where nobody waits for a rank's last word: it speaks itself."""
    port = free_port()
    run = load_run(run_file)
    plan = make_plan(run, Cluster(cards_per_server=2), resolve_layout(run, 2))
    order = Order(plan.model_dump_json(), "", str(run_file.parent / "run"), tokens=None)
    rank = multiprocessing.get_context("fork").Process(target=be_worker, args=(work, order, 0, 2, port))
    begun_s = time.monotonic()
    rank.start()
    rank.join(60)
    assert rank.exitcode == 1
    assert time.monotonic() - begun_s < 40
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"triax: rank 0 (dp_shard=0) could not meet the other ranks at 127.0.0.1:{port}: ")
