"""Do several servers, here as commands on one machine, train one run and go on when one of them is lost?"""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.several import WITHIN_S, assert_same_run, events, make_several, newest_step, reference, step_lines
from tests.cli.typed import Typed, ended, refuse, started, triax, until, workers_of

STEPS = 500
"""So many that a server is back before the other has taken them alone."""


def start(folder: Path, name: str, *words: object, nnodes: str = "1:2") -> "subprocess.Popen[str]":
    """Start a server; each has an address of its own, as on a network."""
    address = f"127.0.0.{ord(name) - ord('a') + 2}"
    return started(
        triax("train", "run.toml", "--nnodes", nnodes, "--ranks", 1, "--run-dir", "run", "--server", name,
              "--local-addr", address, "-q", *words),
        folder,
    )  # fmt: skip


def kill(server: "subprocess.Popen[str]") -> None:
    """What a power cut does to the command and its ranks."""
    for pid in [server.pid, *workers_of(server)]:
        os.kill(pid, signal.SIGKILL)
    server.communicate()


def test_a_server_is_lost_and_comes_back(tmp_path: Path) -> None:
    make_several(tmp_path, STEPS, guard={"alert_command": ["tee", "-a", str(tmp_path / "alerts")]})
    run_dir, alone = tmp_path / "run", reference(tmp_path)
    a, b = start(tmp_path, "a"), start(tmp_path, "b")
    until(lambda: newest_step(run_dir) >= 8, a)
    kill(b)
    until(lambda: bool(events(run_dir, "lost_server")), a)
    (lost,) = events(run_dir, "lost_server")
    assert (lost["detail"]["lost"], lost["detail"]["servers"]) == (["b"], ["a"])
    until(lambda: step_lines(run_dir)[-1][0] > lost["time"], a)
    assert next(at_s for at_s, _ in step_lines(run_dir) if at_s > lost["time"]) < lost["time"] + WITHIN_S
    b = start(tmp_path, "b")
    until(lambda: bool(events(run_dir, "grown")), a)
    told = [ended(server) for server in (a, b)]
    assert [one.code for one in told] == [0, 0], told
    assert "Traceback" not in told[0].err + told[1].err
    assert "lost server b: not heard of, or cut off, for 6.0 s." in told[0].err
    assert_same_run(run_dir, alone)
    layouts = [event["detail"]["layout"] for event in events(run_dir, "start", "resume")]
    assert layouts[0] == layouts[2] != layouts[1]
    assert [event["detail"]["servers"] for event in events(run_dir, "grown")] == [["a", "b"]]
    alert = json.loads((tmp_path / "alerts").read_text())
    assert (alert["kind"], alert["server"], alert["detail"]["lost"]) == ("lost_server", "a", ["b"])
    assert alert["detail"]["reason"].startswith("lost server b: not heard of")
    # Growing lost nothing: ranks had saved where they stopped.
    grown, resumed = events(run_dir, "grown")[0], events(run_dir, "resume")[-1]
    stopped = events(run_dir, "stop")[-1]
    assert grown["step"] == resumed["step"] == stopped["step"]


@pytest.mark.slow
def test_one_server_is_asked_to_go_and_then_all(tmp_path: Path) -> None:
    """SIGTERM takes one server out, as where it is reclaimed; the file ``stop`` ends the run for all."""
    make_several(tmp_path, 100_000)
    run_dir = tmp_path / "run"
    a, b = start(tmp_path, "a"), start(tmp_path, "b")
    until(lambda: newest_step(run_dir) >= 3, a)
    a.terminate()
    assert ended(a).code == 75
    until(lambda: bool(events(run_dir, "lost_server")), b)
    seen = newest_step(run_dir)
    until(lambda: newest_step(run_dir) > seen, b)
    (run_dir / "stop").touch()
    assert ended(b).code == 75
    assert not events(run_dir, "failure")


@pytest.mark.slow
def test_a_rank_that_dies_starts_all_again(tmp_path: Path) -> None:
    make_several(tmp_path, 60)
    run_dir, alone = tmp_path / "run", reference(tmp_path)
    a, b = start(tmp_path, "a"), start(tmp_path, "b")
    until(lambda: newest_step(run_dir) >= 8, a)
    os.kill(workers_of(b)[0], signal.SIGKILL)
    told = [ended(server) for server in (a, b)]
    assert [one.code for one in told] == [0, 0], told
    (failure,) = events(run_dir, "failure")
    assert failure["detail"]["how"] == "was killed by SIGKILL"
    assert events(run_dir, "lost_server") == []
    assert_same_run(run_dir, alone)


@pytest.mark.slow
def test_a_fault_that_comes_back_ends_it_for_all(tmp_path: Path) -> None:
    """Here a rank of one server dies in the same step again and again."""
    make_several(tmp_path, 60, checkpoint={"every_steps": 1000})
    run_dir = tmp_path / "run"
    a, b = (
        start(tmp_path, "a", "recover.same_fault=1000", "--max-restarts", 1),
        start(tmp_path, "b", "recover.same_fault=1000", "--max-restarts", 1),
    )
    for _ in range(2):
        begun = len(events(run_dir, "start"))
        until(lambda begun=begun: len(events(run_dir, "start")) > begun and bool(workers_of(b)), b)
        os.kill(workers_of(b)[0], signal.SIGKILL)
    told = [ended(server) for server in (a, b)]
    assert [one.code for one in told] == [1, 1], told
    assert all("1 restarts in a row have gained no checkpoint" in one.err for one in told)


@pytest.mark.parametrize("nnodes", ["0", "2:1", "x", "1:2:3", "-1", "1:", ""])
def test_numbers_that_are_none(nnodes: str, tmp_path: Path, here: Typed) -> None:
    make_several(tmp_path, 4)
    refuse(here("train", "run.toml", f"--nnodes={nnodes}", "--ranks", 1), f"--nnodes {nnodes} is no number of servers")


def test_what_cannot_be_is_refused(tmp_path: Path, here: Typed) -> None:
    make_several(tmp_path, 4)
    words = ("train", "run.toml", "--ranks", 1, "--run-dir", "run")
    refuse(here(*words, "--server", "a"), "--server and --local-addr say which of several servers this is")
    refuse(here(*words, "--nnodes", 2, "--server", "a/b"), "'a/b' is no name of a server")
    refuse(here(*words, "--nnodes", 2, "--local-addr", "192.0.2.7"), "192.0.2.7 is no address of this server")
    refuse(here(*words, "--nnodes", 257), "sequences")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
