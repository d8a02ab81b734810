"""Is a rank of a run that is slower than its equals named, with the work that it is slow in, and no other rank?"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.cli.typed import make_run
from tests.harness.commands import Said, fork_workers, triax
from tests.harness.ranks import run_ranks
from triax.parallel.launch import Process
from triax.parallel.progress import Progress
from triax.parallel.slot import Slot
from triax.parallel.waits import KINDS, BusyClock
from triax.spec.layout import Layout
from triax.train.pace import Pace, equals
from triax.train.reporter import Reporter
from triax.watch.record import SERVER, read_events

STEPS = 80
LAYOUTS = [
    ("dp_replicate=2 zero=0", 2),
    ("dp_shard=2 zero=3", 2),
    ("tp=2", 2),
    ("pp=2 dp_shard=2 zero=2", 4),
]


def slow_down(rank: int, part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every stretch of work of ``rank`` take longer by ``part`` of what it takes, in the time of a clock on the
    wall; rests of less than half a millisecond, which no sleep is as short as, are saved up."""
    turn, owed = BusyClock.turn, [0.0]

    def slower(self: BusyClock, kind: str) -> None:
        if os.environ["RANK"] == str(rank) and self._kind is not None:
            passed, ran, queued = (now - before for now, before in zip(self._now(), self._mark, strict=True))
            owed[0] += part * max(passed - self._waited_ns - queued, ran) / 1e9
            if owed[0] > 5e-4:
                begun_s = time.monotonic()
                time.sleep(owed[0])
                owed[0] -= time.monotonic() - begun_s
        turn(self, kind)  # type: ignore[arg-type]

    monkeypatch.setattr(BusyClock, "turn", slower)


@pytest.fixture
def train(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, int], Said]:
    fork_workers(monkeypatch)
    model = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    run = make_run(
        tmp_path, model=model, data={"seq_len": 64}, train={"steps": STEPS, "sequences_per_step": 8},
        checkpoint={"every_steps": 0}, guard={"check_initial_loss": False},
    )  # fmt: skip

    def started(layout: str, ranks: int) -> Said:
        words = [
            "--ranks",
            str(ranks),
            "--layout",
            f"{layout} microbatches=2",
            "--run-dir",
            str(tmp_path / "run"),
            "-q",
        ]
        return triax(["train", str(run), *words], capfd)

    return started


@pytest.mark.slow
def test_a_slow_rank_is_named_within_fifty_steps(
    train: Callable[[str, int], Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(train, tmp_path, monkeypatch, *LAYOUTS[1], part=0.6, by_step=50)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
def test_a_slow_rank_is_named_in_every_kind_of_layout(
    layout: str, ranks: int, train: Callable[[str, int], Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By 30 %. What else runs on the machine may make it later than 50 steps; at which noise it is not, the series of
    ``tests/watch/test_stragglers.py`` say."""
    named(train, tmp_path, monkeypatch, layout, ranks, part=0.3, by_step=STEPS)


def named(
    train: Callable[[str, int], Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, ranks: int,
    part: float, by_step: int,
) -> None:  # fmt: skip
    slow_down(1, part, monkeypatch)
    said = train(layout, ranks)
    assert said.code == 0, said.err
    (event,) = (event for event in read_events(tmp_path / "run") if event["kind"] == "straggler")
    assert event["rank"] == 1
    assert event["step"] <= by_step
    assert 0.15 < event["detail"]["above"] < 1
    assert event["detail"]["phase"] in ("forward", "backward", "the rest of a step")


@dataclass
class Told:
    """A reporter that keeps what it is told."""

    is_voice: bool = True
    lines: list[str] = field(default_factory=list)
    events: list[tuple[Any, ...]] = field(default_factory=list)

    def warn(self, line: str) -> None:
        self.lines.append(line)

    def event_of(self, *event: Any) -> None:
        self.events.append(event)


def test_one_rank_tells_of_a_rank_that_becomes_slow_and_fast_again_in_a_line() -> None:
    """Also of one on another server, by the name that its agent has given it."""

    def run_one(rank: int, world: int) -> list[str]:
        if rank == 1:
            os.environ[SERVER] = "node-b"
        progress, told = Progress(), Told(is_voice=rank == 0)
        process = Process(rank, world, 0, 1, torch.device("cpu"))
        pace = Pace(Layout(dp_shard=2), process, progress, cast(Reporter, told), 0.15)
        for step in range(1, 161):
            busy_s = [1e-3, 1.0, 2.0, 0.5]
            if rank == 1 and 40 < step <= 100:
                busy_s[2] *= 1.6
            progress.clock.stop = lambda seconds=busy_s: seconds  # type: ignore[method-assign]
            pace.end(step)
        assert [event[:2] for event in told.events] == ([(1, "node-b")] * 2 if rank == 0 else [])
        return told.lines

    slow, fast = run_ranks(run_one, 2)[0]
    assert slow.startswith("rank 1 (dp_shard=1) on node-b is slow: busy for 34 % longer in a step than ")
    assert slow.endswith("ranks with equal work, most of it in backward (step 60).")
    assert fast.endswith("is as fast as ranks with equal work again (step 130).")


def test_waits_in_every_kind_of_collective_are_none_of_the_work() -> None:
    """One rank comes late to each; the other is not busy meanwhile, and is seen to wait."""

    def late_by_a_tenth(rank: int, world: int) -> list[float]:
        whole, part, peer = torch.ones(4), torch.ones(2), 1 - rank
        calls: list[Callable[[], object]] = [
            lambda: dist.all_reduce(whole),
            lambda: dist.all_gather_single(whole, part),
            lambda: dist.reduce_scatter_single(part, whole),
            lambda: dist.all_to_all_single(whole, torch.ones(4)),
            lambda: [work.wait() for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, whole, peer), dist.P2POp(dist.irecv, torch.ones(4), peer)]
            )],
            lambda: dist.barrier(),
        ]  # fmt: skip
        clock, busy_s = BusyClock(Slot()), []
        with clock.following():
            for call in calls:
                dist.barrier()
                clock.start("forward")
                if rank == 1:
                    time.sleep(0.3)
                call()
                busy_s.append(sum(clock.stop()))
        return busy_s

    early, late = run_ranks(late_by_a_tenth, 2)
    assert all(seconds < 0.15 for seconds in early), early
    assert all(seconds >= 0.29 for seconds in late), late


def test_time_is_counted_by_kind_and_only_when_asked() -> None:
    clock = BusyClock(Slot())
    clock.turn("forward")
    time.sleep(0.02)
    clock.start("data")
    time.sleep(0.02)
    clock.turn("backward")
    time.sleep(0.04)
    spent = dict(zip(KINDS, clock.stop(), strict=True))
    assert 0.02 <= spent["data"] < 0.04 <= spent["backward"]
    assert spent["forward"] == 0
    clock.start("data")
    assert sum(clock.stop()) < 0.02


def test_equals_have_the_same_work() -> None:
    layout = Layout(pp=2, dp_shard=4, ep=2, zero=2)
    groups = [equals(layout, rank) for rank in range(8)]
    assert len(set(groups)) == 4
    assert all(groups.count(group) == 2 for group in groups)
    assert len({equals(Layout(pp=2, dp_shard=4), rank) for rank in range(8)}) == 2
