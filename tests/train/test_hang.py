"""Is a rank that stands still named, with what it was doing, are all started again, and is nothing named that moves?"""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.typed import ended, make_run, num_lines, started, until, workers_of
from tests.cli.typed import triax as command_line
from tests.harness.commands import fork_workers, triax
from tests.train.test_lost_ranks import RUN, on_rank
from triax.spec.layout import Layout
from triax.spec.run import WatchSpec
from triax.train import hang as module
from triax.train.hang import Hang, HangWatch, Standing, odd_one, standings, summary
from triax.train.places import Places, make_places
from triax.train.stacks import ProcessState, process_state
from triax.watch.record import read_events

LAYOUT = Layout(dp_replicate=2, tp=2, zero=0)
SLEEPS, STOPPED, IN_KERNEL = (ProcessState(letter, "") for letter in "STD")


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(time, "monotonic_ns", lambda: int(self.now_s * 1e9))


class Watched:
    """Four ranks that move when a test says so, and who watches them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **limits: float) -> None:
        self.clock, self.told = Clock(monkeypatch), list[tuple[str, str]]()
        self.places: Places = make_places(folder / "places", 4)
        self.states = dict.fromkeys(range(1, 5), SLEEPS)
        monkeypatch.setattr(module, "process_state", self.states.__getitem__)
        for rank in range(4):
            self.places.slot(rank).sign(rank + 1, None)
        self.watch = HangWatch(
            self.places, LAYOUT, 0, 4, WatchSpec(**limits), folder / "stacks", "host",
            lambda kind, sentence, _hang: self.told.append((kind, sentence)),
        )  # fmt: skip

    def move(self, step: int | None, phase: str = "here", ranks: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        for rank in ranks:
            self.places.slot(rank).enter(step)
            self.places.slot(rank).change(phase)

    def steps(self, count: int, seconds: float) -> None:
        for step in range(1, count + 1):
            self.move(step, f"step {step}, here")
            self.wait(seconds)

    def wait(self, seconds: float) -> float | None:
        """Let time go by as for one who looks ten times a second; return the last answer."""
        answer = None
        for _ in range(round(seconds * 10)):
            self.clock.now_s += 0.1
            answer = self.watch()
        return answer


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watched]:
    return lambda **limits: Watched(tmp_path, monkeypatch, **limits)


def test_ranks_that_stand_still_are_told_once_and_end_at_the_hard_limit(watched: Callable[..., Watched]) -> None:
    case = watched(hang_soft_s=5.0, hang_hard_s=20.0)
    case.move(3, "step 3, forward")
    case.places.slot(0).wait_since(1)
    case.places.slot(1).wait_since(1)
    case.places.slot(3).wait_since(1)
    assert case.wait(4.5) is None
    assert case.told == []
    assert case.wait(14) is None
    ((kind, sentence),) = case.told
    assert kind == "hang"
    assert re.fullmatch(
        r"no rank has moved for [45]\.[0-9] s: rank 2 \(dp_replicate=1 tp=0\) on host stands still in step 3, forward, "
        r"and all others here wait for a peer; the stacks of all ranks are in .*stacks\.",
        sentence,
    )
    assert case.wait(2) == 0.0
    assert case.watch.failure is not None
    assert (case.watch.failure.rank, case.watch.failure.step, case.watch.failure.how) == (2, 3, "stood still")
    assert len(case.told) == 1


def test_ranks_that_move_again_are_told(watched: Callable[..., Watched]) -> None:
    case = watched(hang_soft_s=5.0)
    case.move(3)
    case.wait(8)
    case.move(3, "there", (1,))
    assert case.wait(2) is None
    assert [kind for kind, _ in case.told] == ["hang", "hang_over"]


def test_one_rank_that_moves_is_no_hang(watched: Callable[..., Watched]) -> None:
    case = watched(hang_soft_s=5.0)
    case.move(3)
    for phase in "abcdefgh":
        case.move(3, phase, (2,))
        case.wait(4)
    assert case.told == []


@pytest.mark.parametrize("section", ["saving", "evaluation", "the start", "the wait for prepared tokens"])
def test_what_is_no_step_may_take_its_time(watched: Callable[..., Watched], section: str) -> None:
    """Also where the others are back in a step and wait for the one that is not."""
    case = watched(hang_soft_s=5.0)
    case.steps(3, 1.0)
    case.states[2] = IN_KERNEL
    case.move(None, section, (1,))
    case.move(4, "step 4", (0, 2, 3))
    assert case.wait(600) is None
    assert case.told == []


@pytest.mark.parametrize("step", [None, 7])
def test_a_stopped_rank_is_named_wherever_it_is(watched: Callable[..., Watched], step: int | None) -> None:
    case = watched(hang_soft_s=5.0)
    case.move(step, "saving" if step is None else "step 7")
    case.states[4] = STOPPED
    for _ in range(3):
        case.move(step, "moving", (0, 1, 2))
        case.wait(2)
    ((_, sentence),) = case.told
    assert sentence.startswith("rank 3 (dp_replicate=1 tp=1) on host is stopped, for ")
    assert (case.watch.folder / f"rank-3-step{step or 0}.txt").read_text().endswith("stopped and cannot say where.\n")


@pytest.mark.parametrize(("step_s", "soft_s"), [(0.5, 30.0), (20.0, 200.0)])
def test_the_limit_follows_the_steps(watched: Callable[..., Watched], step_s: float, soft_s: float) -> None:
    case = watched()
    case.steps(5, step_s)
    assert case.watch.soft_s == pytest.approx(soft_s, rel=0.1)
    assert case.watch.hard_s == pytest.approx(4 * soft_s, rel=0.1)
    case.move(6)
    case.wait(0.85 * soft_s)
    assert case.told == []
    case.wait(0.3 * soft_s)
    assert len(case.told) == 1


def test_the_first_step_may_take_its_time_where_no_limit_is_said(watched: Callable[..., Watched]) -> None:
    case = watched()
    case.move(1)
    assert case.wait(500) is None
    assert case.told == []


def test_who_was_stopped_with_its_ranks_has_seen_no_hang(watched: Callable[..., Watched]) -> None:
    """As by Ctrl-Z, for an hour."""
    case = watched(hang_soft_s=5.0)
    case.move(3)
    case.wait(3)
    case.clock.now_s += 3600
    case.wait(4)
    assert case.told == []
    case.wait(3)
    assert len(case.told) == 1


def test_who_is_to_blame() -> None:
    waiting = [Standing(rank, 4, "here", True, 10.0, True) for rank in range(4)]
    busy, behind, long = (
        replace(waiting[1], is_waiting=False),
        replace(waiting[2], step=3),
        replace(waiting[3], idle_s=11),
    )
    assert odd_one([waiting[0], busy, behind, long], {}).rank == 1
    assert odd_one([waiting[0], waiting[1], behind, long], {}).rank == 2
    assert odd_one([waiting[0], waiting[1], waiting[2], long], {}).rank == 3
    assert odd_one([waiting[0], busy, behind, long], {0: SLEEPS, 3: IN_KERNEL}).rank == 3
    assert odd_one([waiting[0], busy, behind, long], {0: STOPPED, 3: IN_KERNEL}).rank == 0


def test_all_that_wait_look_elsewhere() -> None:
    waiting = [Standing(rank, 4, "step 4, backward", True, 10.0, True) for rank in range(4)]
    said = Hang(waiting[1], SLEEPS, waiting, 10.0).sentence(LAYOUT, "host", "")
    assert "all wait" in said
    assert "for a rank of another server or for a message that was lost" in said


def test_a_server_in_a_few_words(tmp_path: Path) -> None:
    places = make_places(tmp_path / "places", 2)
    for local, step in ((0, 5), (1, 4)):
        places.slot(local).enter(step)
        places.slot(local).change(f"step {step}, here")
    now_ns = places.slot(1).changed_ns + 2 * 10**9
    found = summary(standings(places, 6, 2, now_ns), {6: SLEEPS, 7: SLEEPS})
    assert (found.idle_s, found.is_stepping, found.odd) == (2.0, True, 7)
    assert summary(standings(places, 6, 2, now_ns), {6: STOPPED, 7: SLEEPS}).odd == 6


class TwoServers:
    """Four ranks on each of two servers, whose watches hear each other a second late, as through a shared disk."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.servers = []
        for number in (0, 1):
            (folder / str(number)).mkdir()
            self.servers.append(Watched(folder / str(number), monkeypatch, hang_soft_s=8.0, hang_hard_s=20.0))
        self.servers[1].watch.first_rank, self.servers[1].watch.server = 4, "other"
        self.servers[0].clock = self.servers[1].clock
        self.states = dict.fromkeys(range(1, 9), SLEEPS)
        monkeypatch.setattr(module, "process_state", self.states.__getitem__)
        for local in range(4):
            self.servers[1].places.slot(local).sign(local + 5, None)
        for server in self.servers:
            server.watch.layout = Layout(dp_replicate=4, tp=2, zero=0)

    def all_wait(self, *but: tuple[int, int]) -> None:
        """Let all ranks come to step 3 and wait for peers there, but for those of these servers and local numbers."""
        for number, server in enumerate(self.servers):
            server.move(3, "step 3, forward")
            for local in range(4):
                server.places.slot(local).wait_since(0 if (number, local) in but else 1)

    def wait(self, seconds: float) -> list[float | None]:
        answers: list[float | None] = []
        for turn in range(round(seconds * 10)):
            if turn % 10 == 0:
                told = [json.loads(json.dumps(server.watch.told())) for server in self.servers]
            self.servers[0].watch.others, self.servers[1].watch.others = [told[1]], [told[0]]
            self.servers[0].clock.now_s += 0.1
            answers = [server.watch() for server in self.servers]
        return answers

    def told(self) -> list[str]:
        return [sentence for server in self.servers for _, sentence in server.told]


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TwoServers:
    return TwoServers(tmp_path, monkeypatch)


@pytest.mark.parametrize(("server", "local"), [(0, 2), (1, 0), (1, 3)])
def test_of_two_servers_the_one_speaks_that_has_the_rank(two: TwoServers, server: int, local: int) -> None:
    """And it alone ends its ranks at the hard limit: the others lose them."""
    two.all_wait((server, local))
    two.wait(8)
    (said,) = two.told()
    rank, name = 4 * server + local, ("host", "other")[server]
    assert f"rank {rank} (dp_replicate={rank // 2} tp={rank % 2}) on {name} stands still in step 3, forward" in said
    answers = two.wait(13)
    assert (answers[server], answers[1 - server]) == (0.0, None)
    failure = two.servers[server].watch.failure
    assert failure is not None
    assert (failure.rank, failure.how) == (rank, "stood still")
    assert len(two.told()) == 1


def test_a_stopped_rank_of_another_server_is_told_there_alone(two: TwoServers) -> None:
    two.all_wait()
    two.states[7] = STOPPED
    two.wait(12)
    (said,) = two.told()
    assert said.startswith("rank 6 (dp_replicate=3 tp=0) on other is stopped, for ")


def test_a_message_that_was_lost_is_told_once(two: TwoServers) -> None:
    two.all_wait()
    two.wait(12)
    (said,) = two.told()
    assert "all wait, rank 0 (dp_replicate=0 tp=0) on host in step 3, forward, for a rank of another server" in said


@pytest.mark.parametrize("section", ["saving", None])
def test_a_server_that_waits_for_one_that_works_is_no_hang(two: TwoServers, section: str | None) -> None:
    two.all_wait()
    for turn in range(20):
        two.servers[1].move(None if section else 3, section or f"turn {turn}", (1,))
        two.wait(2)
    assert two.told() == []


@pytest.mark.parametrize("said", [{}, {"idle_s": "x"}, {"odd": 1}])
def test_a_server_that_has_told_nothing_is_no_hang(watched: Callable[..., Watched], said: dict[str, object]) -> None:
    """Its ranks may still start."""
    case = watched(hang_soft_s=5.0)
    case.move(3)
    case.watch.others = [said]
    case.wait(30)
    assert case.told == []


def test_a_stopped_rank_of_a_run_is_named_and_the_run_ends_well(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_workers(monkeypatch)
    (tmp_path / "corpus.txt").write_text("to be or not to be that is the question " * 100)
    limits = "tensorboard = false\nhang_soft_s = 1.0\nhang_hard_s = 3.0"
    text = RUN.replace("tensorboard = false", limits).replace("timeout_s = 2.0", "timeout_s = 60.0")
    (tmp_path / "run.toml").write_text(text)
    first = tmp_path / "stopped before"

    def stop() -> None:
        if not first.exists():
            first.touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    on_rank(2, stop, monkeypatch)
    folder = tmp_path / "run"
    words = ["--ranks", "4", "--layout", "pp=2 dp_shard=2", "--run-dir", str(folder), "-q"]
    said = triax(["train", str(tmp_path / "run.toml"), *words], capfd)
    assert said.code == 0, said.err
    named, restarted = said.err.splitlines()
    who = r"triax: rank 2 \(pp=1 dp_shard=0\) on \S+ is stopped, for [0-9.]+ m?s, in step 1, end of the step"
    assert re.fullmatch(rf"{who}; the stacks of all ranks are in {folder}/stacks\.", named)
    assert re.match(rf"{who}\. All ranks go on from", restarted)
    (event,) = (event for event in read_events(folder) if event["kind"] == "hang")
    assert (event["rank"], event["step"], event["coordinate"]["pp"]) == (2, 1, 1)
    assert event["detail"]["phase"] == "step 1, end of the step"
    assert event["detail"]["state"] == "is stopped"
    assert "stopped and cannot say where" in (folder / "stacks" / "rank-2-step1.txt").read_text()
    for rank in (0, 1, 3):
        stack = (folder / "stacks" / f"rank-{rank}-step2.txt").read_text()
        assert "loop.py" in stack, stack
        assert "wait" in stack


@pytest.mark.slow
def test_a_rank_that_somebody_stops_is_named_within_the_soft_limit_and_goes_on_when_it_may(tmp_path: Path) -> None:
    """By a signal from outside, at any moment of a real start."""
    soft_s = 4.0
    run = make_run(tmp_path, train={"steps": 100_000}, watch={"hang_soft_s": soft_s, "hang_hard_s": 120.0})
    folder = tmp_path / "runs" / run.stem
    process = started(command_line("train", run, "--ranks", "2", "-q"), tmp_path)
    until(lambda: num_lines(folder / "metrics.jsonl") > 5, process)
    rank = workers_of(process)[1]
    begun_s = time.monotonic()
    os.kill(rank, signal.SIGSTOP)
    assert process_state(rank).is_stopped
    until(lambda: any(event["kind"] == "hang" for event in read_events(folder)), process)
    took_s = time.monotonic() - begun_s
    (event,) = (event for event in read_events(folder) if event["kind"] == "hang")
    assert soft_s - 1 <= took_s <= soft_s + 2  # the second is for starting to look, and reading the event
    assert event["detail"]["stands_s"] <= soft_s
    os.kill(rank, signal.SIGCONT)
    until(lambda: any(event["kind"] == "hang_over" for event in read_events(folder)), process)
    process.send_signal(signal.SIGTERM)
    said = ended(process)
    assert said.code == 75, said
    assert said.err.count("rank 1 (") == 1


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="hang_hard_s=3 comes before hang_soft_s=5: use at least 5"):
        WatchSpec(hang_soft_s=5, hang_hard_s=3)
    assert WatchSpec(hang_soft_s=5, hang_hard_s=0).hang_hard_s == 0
