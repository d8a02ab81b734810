"""Is no signal lost while ranks are started, and is a rank that stands still ended in seconds?"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.typed import started
from triax.launch.agent import raised_once


class Asked(Exception):
    """What a handler raises here."""


def asked(text: str, _number: signal.Signals) -> Asked:
    return Asked(text)


@pytest.fixture
def together() -> Iterator[Callable[..., None]]:
    """Sends several signals to this process that are answered at the same moment."""

    def send(*numbers: signal.Signals) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        for number in numbers:
            os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    yield send
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))


def test_signals_at_the_same_moment_are_one(together: Callable[..., None], capfd: pytest.CaptureFixture[str]) -> None:
    with raised_once(asked):
        with pytest.raises(Asked, match="SIGINT asks for an end"):
            together(signal.SIGTERM, signal.SIGINT)
        together(signal.SIGTERM, signal.SIGINT)
    assert capfd.readouterr().err == ""


def test_a_signal_waits_for_what_must_not_be_cut() -> None:
    done = []

    def start() -> None:
        with uncut():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("whole")
        done.append("never")

    with raised_once(asked) as uncut, pytest.raises(Asked):
        start()
    assert done == ["whole"]


RUN = """
import os, signal, time
from multiprocessing.process import BaseProcess
from triax.launch.agent import run_workers, warm_up
warm_up("tests.launch.ranks_that_wait", "triax.train.worker", num_ranks=2)
from tests.launch.ranks_that_wait import stand_still_or_fail, wait_to_be_asked
from triax.launch import elastic

start = BaseProcess.start

def start_and_be_interrupted(self):
    start(self)
    BaseProcess.start = start
    os.kill(os.getpid(), signal.SIGINT)

"""


def test_ctrl_c_between_the_starts_of_two_ranks_reaches_both(tmp_path: Path) -> None:
    """Cut in half, the start would leave a rank that nobody knows, and that the command waits for at its end."""
    script = f"{RUN}BaseProcess.start = start_and_be_interrupted\nprint(run_workers(wait_to_be_asked, '.', 2, 30).code)"
    command = started([sys.executable, "-c", script], tmp_path)
    out, err = command.communicate(timeout=60)
    assert (command.returncode, out, err) == (0, "75\n", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.slow
def test_a_rank_that_stands_still_is_ended_in_seconds(tmp_path: Path) -> None:
    script = (
        f"{RUN}elastic._LAST_WORDS_S = 1\nbegun = time.monotonic()\n"
        "print(run_workers(stand_still_or_fail, '.', 2, 30))\nprint(time.monotonic() - begun)"
    )
    command = started([sys.executable, "-c", script], tmp_path)
    out, err = command.communicate(timeout=60)
    said, seconds = out.splitlines()
    assert (command.returncode, said, err) == (0, "Ended(code=1, wordless={})", "")
    assert float(seconds) < 20
    still = int((tmp_path / "stopped").read_text())
    deadline_s = time.monotonic() + 10
    while (status := Path(f"/proc/{still}/status")).exists() and not re.search(r"State:\s+Z", status.read_text()):
        assert time.monotonic() < deadline_s, "it is still there"
        time.sleep(0.1)
