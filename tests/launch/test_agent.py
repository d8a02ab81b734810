"""Is no signal lost while ranks are started, is none left over, and is a rank that stands still ended in seconds?"""

import re
import sys
import time
from pathlib import Path

from tests.cli.typed import started

RUN = """
import os, signal, time
from multiprocessing.process import BaseProcess
from triax.launch.agent import alone, run_workers
from triax.launch.workers import warm_up
from triax.train.stop import StopWish, stop_signals
warm_up("tests.launch.ranks_that_wait", num_ranks=2)
from tests.launch import ranks_that_wait

wish = StopWish()
start = BaseProcess.start

def start_and_be_interrupted(self):
    start(self)
    BaseProcess.start = start
    os.kill(os.getpid(), signal.SIGINT)

def run(work):
    with stop_signals(wish):
        return run_workers(work, ".", alone(2), 30, lambda: 30 if wish.is_asked else None)

"""


def is_over(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or re.search(r"State:\s+Z", status.read_text()) is not None


def gone(pid: int) -> bool:
    """Whether a process ends within ten seconds."""
    deadline_s = time.monotonic() + 10
    while not is_over(pid):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def test_ctrl_c_between_the_starts_of_two_ranks_reaches_both(tmp_path: Path) -> None:
    """Cut in half, the start would leave a rank that nobody knows, and that the command waits for at its end."""
    script = f"{RUN}BaseProcess.start = start_and_be_interrupted\nprint(run(ranks_that_wait.wait_to_be_asked).code)"
    command = started([sys.executable, "-c", script], tmp_path)
    out, err = command.communicate(timeout=60)
    assert (command.returncode, out, err) == (0, "75\n", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_a_rank_that_stands_still_is_ended_in_seconds(tmp_path: Path) -> None:
    """It explains nothing: the other one has failed."""
    script = (
        f"{RUN}begun = time.monotonic()\nprint(run(ranks_that_wait.stand_still_or_fail))\n"
        "print(time.monotonic() - begun)"
    )
    command = started([sys.executable, "-c", script], tmp_path)
    out, err = command.communicate(timeout=60)
    said, seconds = out.splitlines()
    assert (command.returncode, said, err) == (0, "Ended(code=1, wordless={})", "")
    assert float(seconds) < 20
    assert gone(int((tmp_path / "stopped").read_text()))


def test_ranks_whose_fork_server_is_killed_are_ended_too(tmp_path: Path) -> None:
    """Nobody can learn then how they ended, and they might train on unseen."""
    script = f"{RUN}print(run(ranks_that_wait.lose_the_fork_server))"
    command = started([sys.executable, "-c", script], tmp_path)
    out, err = command.communicate(timeout=60)
    assert (command.returncode, err) == (0, "")
    assert "ended in a way that nobody saw" in out
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert all(map(gone, pids))
