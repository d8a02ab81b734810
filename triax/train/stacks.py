"""Where in its code does a rank stand, also one that never answers? Asked by a signal, answered from inside any call.

The answer goes into a file in the memory of the rank, which needs no disk and leaves nothing behind; whoever asks reads
it through ``/proc``. Torch-free, and for Linux: elsewhere ranks are named without their stacks.
"""

import faulthandler
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ASK: Final = signal.SIGUSR2
"""No other signal of a run: the others ask it to stop."""

_ANSWERS_WITHIN_S: Final = 1.0
_LOOK_S: Final = 0.05

_STATES: Final = {"R": "runs", "S": "sleeps", "D": "waits for a disk or a driver", "T": "is stopped", "t": "is traced"}


@contextmanager
def stack_on_request() -> Iterator[int | None]:
    """Let this process write the stacks of its threads when it is asked, for the body of the ``with``; the value is the
    descriptor of the file, None where the system has no such files."""
    if not hasattr(os, "memfd_create"):
        yield None
        return
    file = os.memfd_create("triax-stack")
    faulthandler.register(_ASK, file, all_threads=True)
    try:
        yield file
    finally:
        faulthandler.unregister(_ASK)
        os.close(file)


def stacks_of(files: Mapping[int, int]) -> dict[int, str]:
    """Ask processes for the stacks of their threads and return them by pid, ``""`` where none come within a second.

    ``files``: for each pid the descriptor that ``stack_on_request`` gave it. Processes that have ended are left out.
    """
    answers: dict[int, _Answer] = {}
    for pid, file in files.items():
        path = Path(f"/proc/{pid}/fd/{file}")
        with suppress(OSError):
            answers[pid] = _Answer(path, path.stat().st_size)
            os.kill(pid, _ASK)
    gives_up_s = time.monotonic() + _ANSWERS_WITHIN_S
    while not all(answer.is_whole() for answer in answers.values()) and time.monotonic() < gives_up_s:
        time.sleep(_LOOK_S)
    return {pid: answer.text() for pid, answer in answers.items()}


@dataclass(slots=True)
class _Answer:
    """What comes into a file behind ``start``."""

    path: Path
    start: int
    size: int = 0

    def is_whole(self) -> bool:
        """Return whether something has come, and nothing more since the last call."""
        before, self.size = self.size, len(self.text())
        return 0 < self.size == before

    def text(self) -> str:
        with suppress(OSError), self.path.open("rb") as file:
            file.seek(self.start)
            return file.read().decode(errors="replace")
        return ""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What the system knows of a process."""

    letter: str
    """``R`` runs, ``S`` sleeps, ``D`` waits and cannot be ended, ``T`` stopped, ``?`` not known."""
    waits_in: str
    """The function of the kernel that it waits in; empty where that is not told."""

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has stopped it: it does nothing until SIGCONT."""
        return self.letter in "Tt"

    @property
    def is_in_kernel(self) -> bool:
        """Whether it waits for a disk or a driver."""
        return self.letter == "D"

    @property
    def words(self) -> str:
        """The state in words."""
        known = _STATES.get(self.letter, f"is in state {self.letter}")
        return f"{known} (in {self.waits_in})" if self.is_in_kernel and self.waits_in else known


def process_state(pid: int) -> ProcessState:
    """Return the state of a process, by ``/proc``."""
    letter, waits_in = "?", ""
    with suppress(OSError):
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        waits_in = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    return ProcessState(letter, waits_in)
