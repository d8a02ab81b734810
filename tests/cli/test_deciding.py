"""Does the agent that decides give up when it should, wait where it should, and blame nobody for a silent server?"""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.cli.several import make_several
from triax.cli.servers import Deciding, Plans, Servers, servers_of
from triax.launch.board import Over
from triax.launch.members import Beat, Generation, Known, Member, State, View
from triax.spec.cluster import Cluster
from triax.spec.load import load_run
from triax.train.events import Events
from triax.train.places import Failure
from triax.train.run_folder import RunFolder
from triax.watch.record import read_events

KILLED = Failure("rank 1 was killed by SIGKILL.", "was killed by SIGKILL", 1, "step 3, forward")
ECHO = Failure("rank 0 lost a peer.", "lost a peer", None, "step 3, forward")


@pytest.fixture
def deciding(tmp_path: Path) -> Deciding:
    make_several(tmp_path, 20)
    run = load_run(tmp_path / "run.toml", ["layout.dp_replicate=2", "layout.zero=0"])
    folder = RunFolder(tmp_path / "run")
    plans = Plans(run, Cluster(peak_flops=1e12), 1, folder, has_cards=False)
    return Deciding(plans, Events(folder, run), Servers(1, 2, "a", "127.0.0.1"), None)


def member(name: str) -> Member:
    return Member(name, f"{name}1", "127.0.0.1", 1)


def beat(name: str, state: State, failure: Failure | None = None) -> Known:
    said = {} if failure is None else asdict(failure)
    return Known(Beat(name, f"{name}1", 5, "127.0.0.1", 1, 1, 1, state, 1, failure=said), 0.1)


def failed(deciding: Deciding, budget: object = None, **beats: Known) -> View:
    plan = deciding._plans.of(2).model_dump_json()
    before = Generation(1, 1, (member("a"), member("b")), "start", 1, plan, budget or {})  # type: ignore[arg-type]
    return View("a", beats, None, before, saw_it_train=True)


NEXT = Generation(2, 1, (member("a"), member("b")), "failed", 1)


def test_the_rank_that_died_is_told_and_not_those_that_lost_it(deciding: Deciding, tmp_path: Path) -> None:
    view = failed(deciding, a=beat("a", "failed", ECHO), b=beat("b", "failed", KILLED))
    prepared = deciding.prepare(NEXT, view)
    assert isinstance(prepared, Generation)
    assert prepared.budget["how"] == KILLED.how
    (event,) = read_events(tmp_path / "run")
    assert (event["kind"], event["rank"], event["step"]) == ("failure", 1, 3)


def test_a_fault_that_comes_back_under_another_agent_is_known(deciding: Deciding) -> None:
    view = failed(deciding, a=beat("a", "failed", ECHO), b=beat("b", "failed", KILLED))
    first = deciding.prepare(NEXT, view)
    assert isinstance(first, Generation)
    assert view.generation is not None
    later = replace(view, generation=replace(view.generation, budget=first.budget))
    other = Deciding(deciding._plans, deciding._events, deciding._servers, None)
    over = other.prepare(NEXT, later)
    assert isinstance(over, Over)
    assert (over.code, "2 times in a row at step 3" in over.sentence) == (1, True)


def test_who_lost_a_silent_server_has_not_failed(deciding: Deciding, tmp_path: Path) -> None:
    """It stopped its ranks, since others might have thought that it was gone."""
    view = failed(deciding, a=beat("a", "failed", ECHO), b=beat("b", "stopped"))
    for _ in range(3):
        prepared = deciding.prepare(NEXT, view)
        assert isinstance(prepared, Generation)
        assert prepared.budget["restarts"] == 0
    assert read_events(tmp_path / "run") == []


def test_a_second_restart_waits(deciding: Deciding) -> None:
    budget = {"saved_step": 0, "restarts": 1, "repeated": 1, "step": 2, "how": "x"}
    view = failed(deciding, budget, a=beat("a", "failed", ECHO), b=beat("b", "failed", KILLED))
    assert deciding.prepare(NEXT, view) is None


def test_keys_of_the_layout_are_let_go_where_they_cannot_be(deciding: Deciding) -> None:
    plans = deciding._plans
    assert plans.of(2).layout.dp_replicate == 2
    assert plans.of(1).layout.world_size == 1
    assert plans.of(1).fingerprint == plans.of(2).fingerprint
    assert (plans.can_train(1), plans.can_train(2), plans.can_train(257)) == (True, True, False)


def test_what_is_said_of_servers() -> None:
    found = servers_of("2:4", "a", "127.0.0.2")
    assert (found, found.interface) == (Servers(2, 4, "a", "127.0.0.2"), "lo")
    assert (servers_of("3", "a", None).fewest, servers_of("3", "a", None).most) == (3, 3)
