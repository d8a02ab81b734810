"""Do servers that are really lost and really cut off leave one part that goes on, in time, and never two?"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cli.several import (
    LOST_AFTER_S,
    WITHIN_S,
    assert_same_run,
    events,
    make_several,
    newest_step,
    reference,
    step_lines,
)
from tests.harness.servers import servers, start_triax, wait_for
from triax.launch.emulated import EmulatedCluster
from triax.train.places import open_places

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE_S = 240.0
DETECTED_WITHIN_S = LOST_AFTER_S + 6.0
"""The limit that is said: two seconds to agree, and some turns of agents that share a busy machine."""


def start(cluster: EmulatedCluster, index: int, folder: Path, nnodes: str, ranks: int = 1) -> "subprocess.Popen[bytes]":
    server = cluster.servers[index]
    words = ("train", "run.toml", "--nnodes", nnodes, "--ranks", str(ranks), "--run-dir", "run", "-q")
    who = ("--server", server.name, "--local-addr", server.address)
    return start_triax(
        cluster, index, *words, *who, log=folder / f"{server.name}.log", environment={"CUDA_VISIBLE_DEVICES": ""}
    )


def goes_on_after(run_dir: Path, at_s: float) -> float:
    """Return when the first step after ``at_s`` was written down."""
    wait_for(lambda: step_lines(run_dir)[-1][0] > at_s, "a step after the loss", PATIENCE_S)
    return next(written_s for written_s, _ in step_lines(run_dir) if written_s > at_s)


def ended(process: "subprocess.Popen[bytes]", log: Path) -> None:
    assert process.wait(PATIENCE_S) == 0, log.read_text()


@pytest.mark.parametrize("lost", [0, 1])
def test_either_server_is_lost_for_good_and_one_comes_back(lost: int, tmp_path: Path) -> None:
    make_several(tmp_path, 150)
    run_dir, alone = tmp_path / "run", reference(tmp_path)
    with servers(2) as cluster:
        names = [server.name for server in cluster.servers]
        running = [start(cluster, index, tmp_path, "1:2", ranks=2) for index in (0, 1)]
        wait_for(lambda: newest_step(run_dir) >= 8, "step 8", PATIENCE_S)
        cluster.lose(lost)
        wait_for(lambda: events(run_dir, "lost_server"), "the loss to be seen", PATIENCE_S)
        (seen,) = events(run_dir, "lost_server")
        assert (seen["detail"]["lost"], seen["detail"]["servers"]) == ([names[lost]], [names[1 - lost]])
        assert goes_on_after(run_dir, seen["time"]) < seen["time"] + WITHIN_S
        cluster.bring_back(lost)
        running[lost] = start(cluster, lost, tmp_path, "1:2", ranks=2)
        wait_for(lambda: events(run_dir, "grown"), "the run to grow", PATIENCE_S)
        for process, name in zip(running, names, strict=True):
            ended(process, tmp_path / f"{name}.log")
    assert_same_run(run_dir, alone)
    planned = [event["detail"]["after"] for event in events(run_dir, "replan")]
    assert len(planned) == 2
    assert planned[0] != planned[1]


def test_of_parts_that_are_cut_off_the_larger_goes_on(tmp_path: Path) -> None:
    """Three servers; the one that is cut off still has the disk, waits, writes nothing, and joins again when healed."""
    make_several(tmp_path, 240)
    run_dir, alone = tmp_path / "run", reference(tmp_path)
    with servers(3) as cluster:
        names = [server.name for server in cluster.servers]
        running = [start(cluster, index, tmp_path, "1:3") for index in range(3)]
        wait_for(lambda: newest_step(run_dir) >= 8, "step 8", PATIENCE_S)
        cluster.partition([0])
        cut_s = time.time()
        wait_for(lambda: events(run_dir, "lost_server"), "the cut to be seen", PATIENCE_S)
        (seen,) = events(run_dir, "lost_server")
        assert (seen["detail"]["lost"], seen["detail"]["servers"]) == ([names[0]], names[1:])
        assert seen["time"] - cut_s < DETECTED_WITHIN_S
        assert goes_on_after(run_dir, seen["time"]) < seen["time"] + WITHIN_S
        cluster.heal()
        wait_for(lambda: events(run_dir, "grown"), "the run to grow", PATIENCE_S)
        for process, name in zip(running, names, strict=True):
            ended(process, tmp_path / f"{name}.log")
    assert_same_run(run_dir, alone)
    assert_one_part_at_a_time(run_dir)


def test_a_server_that_loses_the_disk_stops(tmp_path: Path) -> None:
    """It reaches the others and could train on, but must not: nobody hears of it any more."""
    make_several(tmp_path, 240)
    run_dir, alone = tmp_path / "run", reference(tmp_path)
    with servers(2) as cluster:
        running = [start(cluster, index, tmp_path, "1:2") for index in range(2)]
        wait_for(lambda: newest_step(run_dir) >= 8, "step 8", PATIENCE_S)
        cluster.lose_disk(0, run_dir)
        wait_for(lambda: events(run_dir, "lost_server"), "the loss to be seen", PATIENCE_S)
        (seen,) = events(run_dir, "lost_server")
        assert seen["detail"]["servers"] == [cluster.servers[1].name]
        assert goes_on_after(run_dir, seen["time"]) < seen["time"] + WITHIN_S
        cluster.bring_disk_back(0, run_dir)
        for index, process in enumerate(running):
            ended(process, tmp_path / f"{cluster.servers[index].name}.log")
    assert_same_run(run_dir, alone)
    assert_one_part_at_a_time(run_dir)


def test_a_rank_that_stands_still_is_named_by_one_line(tmp_path: Path) -> None:
    """On the server that has it, within the soft limit, and somebody is told; the server without it keeps silent. Then
    all start again, and the run is the same."""
    soft_s = 6.0
    keep = tmp_path / "keep.py"
    keep.write_text("import sys\nopen(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')\n")
    make_several(
        tmp_path, 150, watch={"hang_soft_s": soft_s, "hang_hard_s": 15.0},
        guard={"alert_command": [sys.executable, str(keep), str(tmp_path / "alerts")]},
    )  # fmt: skip
    run_dir, alone = tmp_path / "run", reference(tmp_path)
    with servers(2) as cluster:
        names = [server.name for server in cluster.servers]
        running = [start(cluster, index, tmp_path, "1:2", ranks=2) for index in (0, 1)]
        wait_for(lambda: newest_step(run_dir) >= 8, "step 8", PATIENCE_S)
        stopped_s = time.time()
        os.kill(open_places(run_dir / ".agents" / f"places-{names[1]}").slot(1).pid, signal.SIGSTOP)
        wait_for(lambda: events(run_dir, "hang"), "the hang to be told", PATIENCE_S)
        (hang,) = events(run_dir, "hang")
        for process, name in zip(running, names, strict=True):
            ended(process, tmp_path / f"{name}.log")
    assert hang["detail"]["stands_s"] <= soft_s
    assert hang["time"] - stopped_s < soft_s + 1.0
    assert (hang["rank"], hang["server"], hang["detail"]["state"]) == (3, names[1], "is stopped")
    assert hang["coordinate"] is not None
    said = "".join((tmp_path / f"{name}.log").read_text() for name in names)
    (line,) = (line for line in said.splitlines() if "the stacks of" in line)
    who = rf"triax: rank 3 \([a-z_0-9= ]+\) on {names[1]} is stopped, for [0-9.]+ s, in step [0-9]+, .+"
    assert re.fullmatch(rf"{who}; the stacks of all ranks are in run/stacks\.", line), line
    (failure,) = events(run_dir, "failure")
    assert (failure["rank"], failure["detail"]["how"]) == (3, "stood still")
    assert len(events(run_dir, "restart")) == 1
    assert_same_run(run_dir, alone)
    alerts = [json.loads(text) for text in (tmp_path / "alerts").read_text().splitlines()]
    assert [alert["kind"] for alert in alerts] == ["hang", "failure"]
    assert (alerts[0]["server"], alerts[0]["rank"]) == (names[1], 3)


def assert_one_part_at_a_time(run_dir: Path) -> None:
    """Between the beginnings of attempts steps only grow, and each is one further: two writers would mix theirs."""
    begun = [(event["time"], event["step"]) for event in events(run_dir, "start", "resume")]
    lines = step_lines(run_dir)
    for (began_s, first), (until_s, _) in pairwise([*begun, (float("inf"), 0)]):
        steps = [step for at_s, step in lines if began_s <= at_s < until_s]
        assert steps == list(range(first + 1, first + 1 + len(steps)))
