"""What do ranks do in tests of how they are started and ended? They wait to be asked to leave, or stand still."""

import os
import signal
import time
from pathlib import Path

from triax.launch.workers import REQUEUE
from triax.train.stop import StopWish, stop_signals


def wait_to_be_asked(folder: str) -> None:
    """Leave a file named like the rank once it was asked, and its process as one that has saved."""
    wish = StopWish()
    with stop_signals(wish):
        while not wish.is_asked:
            time.sleep(0.01)
    (Path(folder) / os.environ["RANK"]).touch()
    os._exit(REQUEUE)


def stand_still_or_fail(folder: str) -> None:
    """Stop the process of rank 0, which then answers no signal but SIGKILL; fail as rank 1 once that is so."""
    mark = Path(folder) / "stopped"
    if os.environ["RANK"] == "0":
        mark.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    while not mark.exists():
        time.sleep(0.01)
    os._exit(1)


def lose_the_fork_server(folder: str) -> None:
    """Leave a file named like the process; as rank 1, kill the one that both were forked from once both are there."""
    (Path(folder) / str(os.getpid())).touch()
    while len(os.listdir(folder)) < 2:
        time.sleep(0.01)
    if os.environ["RANK"] == "1":
        os.kill(os.getppid(), signal.SIGKILL)
    while True:
        time.sleep(1)
