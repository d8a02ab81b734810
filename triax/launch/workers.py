"""How are the ranks of one server started, watched and stopped? As forks of a process that has torch loaded.

Importing torch costs seconds for each process. A fork server imports it once, while this process still reads its own
arguments, and stays: a restart costs a fork. Nothing here waits for longer than it is told, so that who watches can
watch other things too.
"""

import atexit
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, TypeVar

from triax.errors import TriaxError

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

Order = TypeVar("Order")

REQUEUE: Final = 75
"""Exit code of a worker that was asked to stop and saved its state (EX_TEMPFAIL)."""

START_METHOD: Final = "forkserver"

_ENDS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""What asks a run for its end."""

_TOLD: Final = (1, 2, 3, REQUEUE)
"""Exit codes of workers that have said themselves why they left."""

_UNKNOWN: Final = 255
"""What multiprocessing says of a worker whose fork server has gone: it may even still run."""

_KILLED_WITHIN_S: Final = 10.0
"""For how long a process that was killed may stay, in a driver for example, before it counts as gone."""


def warm_up(*modules: str, num_ranks: int) -> None:
    """Begin to import ``modules`` in the process that ``num_ranks`` workers will be forked from; returns at once."""
    # Read when torch is imported: the ranks share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // num_ranks, 1)))
    multiprocessing.set_forkserver_preload(list(modules))
    with _scratch_needed():
        # One by one: the first lets signals through again when it has started its process.
        for start in (multiprocessing.resource_tracker.ensure_running, multiprocessing.forkserver.ensure_running):
            with _held_back():
                start()
    atexit.register(_end_fork_server)


def _end_fork_server() -> None:
    """Once this process leaves, nobody asks its fork server for anything; it may still be importing, for seconds."""
    pid = getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Ended:
    """How the workers ended."""

    code: int
    """0: all ended well. Otherwise the code of the worker that tells most: 2 bad input, 3 stopped by the guard, 75
    asked to stop and saved, 1 anything else."""
    wordless: Mapping[int, str] = field(default_factory=dict)
    """Local ranks that died without a word of their own, each with how: ``was killed by SIGKILL``."""


class Workers:
    """The worker processes of one server, from their start to the last exit code."""

    def __init__(
        self, work: Callable[[Order], None], order: Order, environments: Sequence[Mapping[str, str]], shutdown_s: float
    ) -> None:
        """Start one process for each of ``environments``, which runs ``work(order)`` with those variables set.

        Where this process dies, each of them is asked to stop and ends within ``shutdown_s``. Raises TriaxError where
        there is no room for what the processes tell each other.
        """
        context: Any = multiprocessing.get_context(START_METHOD)
        self._processes: list[BaseProcess] = [
            context.Process(target=_be_worker, args=(work, order, dict(environment), shutdown_s))
            for environment in environments
        ]
        self._codes: dict[int, int] = {}
        self._killed: set[int] = set()
        self._kill_at_s: float | None = None
        try:
            with _scratch_needed():
                for process in self._processes:
                    with _held_back():
                        process.start()
        except BaseException:
            self.kill()
            raise

    @property
    def running(self) -> list[int]:
        """Local ranks whose processes have not ended."""
        return [rank for rank in range(len(self._processes)) if rank not in self._codes]

    @property
    def has_failed(self) -> bool:
        """Whether a worker has ended in another way than well or saved."""
        return any(code not in (0, REQUEUE) for code in self._codes.values())

    def pids(self) -> list[int]:
        """Return the numbers of the processes, by local rank."""
        return [process.pid or 0 for process in self._processes]

    def wait(self, timeout_s: float) -> None:
        """Return once a worker has ended, or after ``timeout_s``; those whose time to stop is over are killed."""
        sentinels = [self._processes[rank].sentinel for rank in self.running]
        if self._kill_at_s is not None:
            timeout_s = min(timeout_s, max(self._kill_at_s - time.monotonic(), 0))
        wait(sentinels, timeout_s)
        self._collect()
        if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s and self.running:
            self.kill()

    def stop(self, within_s: float) -> None:
        """Ask all to stop with SIGTERM; ``wait`` kills those that have not ended in time. Asked again, the earlier time
        counts."""
        if self._kill_at_s is None:
            self._send(signal.SIGTERM)
        at_s = time.monotonic() + within_s
        self._kill_at_s = at_s if self._kill_at_s is None else min(self._kill_at_s, at_s)

    def kill(self) -> None:
        """End all that run, and return when they are gone."""
        self._killed |= set(self.running)
        self._send(signal.SIGKILL)
        for rank in self.running:
            if self._processes[rank].pid is not None:
                self._processes[rank].join(_KILLED_WITHIN_S)
        self._collect()
        for rank in self.running:
            self._codes[rank] = -signal.SIGKILL

    def ended(self) -> Ended:
        """Return how the workers ended, none of which runs any more."""
        # SIGTERM and SIGKILL that came from here explain nothing.
        codes = {rank: 1 if rank in self._killed else code for rank, code in self._codes.items()}
        return ended(codes)

    def _collect(self) -> None:
        for rank in self.running:
            code = self._processes[rank].exitcode
            if code == _UNKNOWN:
                self._killed.discard(rank)
                self._end_unwatched(self._processes[rank].pid or 0)
            if code is not None:
                self._codes[rank] = code

    def _send(self, number: signal.Signals) -> None:
        for rank in self.running:
            pid = self._processes[rank].pid
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _end_unwatched(self, pid: int) -> None:
        """Kill a worker whose fork server has gone, and wait until it has no process any more."""
        give_up_s = time.monotonic() + _KILLED_WITHIN_S
        with suppress(ProcessLookupError):
            while time.monotonic() < give_up_s:
                os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)


def ended(codes: Mapping[int, int]) -> Ended:
    """Return how workers ended that left with ``codes``, by local rank; a code below zero is a signal."""
    if not any(codes.values()):
        return Ended(0)
    # SIGTERM: so workers end that were told to, once one has failed, before they could answer it.
    wordless = {rank: code for rank, code in codes.items() if code not in (0, *_TOLD, -signal.SIGTERM)}
    return Ended(
        next((code for code in (2, 3, REQUEUE) if code in codes.values()), 1),
        {rank: _death(code) for rank, code in wordless.items()},
    )


def _death(code: int) -> str:
    if code == _UNKNOWN:
        return "ended in a way that nobody saw, since the process that had started it was gone"
    if code >= 0:
        return f"left with exit code {code}"
    known = -code in {number.value for number in signal.Signals}
    return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


def _be_worker(work: Callable[[Order], None], order: Order, environment: dict[str, str], shutdown_s: float) -> None:
    """In a worker: do the work, and leave where the process that started it is gone.

    Without this a worker would train on where nobody sees it, and never end: its parent is the fork server, which lives
    as long as its children do.
    """
    os.environ.update(environment)
    Thread(target=_follow_parent, args=(shutdown_s,), name="follow-parent", daemon=True).start()
    work(order)


def _follow_parent(shutdown_s: float) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(shutdown_s)
    os._exit(1)


@contextmanager
def _held_back() -> Iterator[None]:
    """Hold back the signals that ask for an end, in the body of the ``with`` and in the processes that it starts.

    Schedulers send them to whole groups. The fork server must outlive the workers, or nobody learns how they ended;
    workers inherit this and take what has come meanwhile as soon as they can answer it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _scratch_needed() -> Iterator[None]:
    """Say in a sentence that processes cannot meet; a name of a socket has at most 107 bytes, so a long TMPDIR is a
    fault too."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise TriaxError(
            f"ranks cannot be started, since they meet in a temporary folder and none can be made: {reason}; set "
            f"TMPDIR to a folder with a short name and room in it, such as /tmp."
        ) from None
