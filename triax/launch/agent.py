"""How are the ranks of one server started, watched and stopped? By torchelastic, with workers that have torch loaded.

Importing torch costs seconds for each process. A fork server imports it once, while this process still reads its own
arguments, and every worker is then a fork of it.
"""

import atexit
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import Final, TypeVar

from triax.errors import TriaxError

Order = TypeVar("Order")

REQUEUE: Final = 75
"""Exit code of a worker that was asked to stop and saved its state (EX_TEMPFAIL)."""

_ENDS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What asks a run for its end, besides a terminal that goes away."""

_TOLD: Final = (1, 2, 3, REQUEUE)
"""Exit codes of workers that have said themselves why they left."""


def warm_up(*modules: str, num_ranks: int) -> None:
    """Begin to import ``modules`` in the process that ``num_ranks`` workers will be forked from; returns at once."""
    # Read when torch is imported: the ranks share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // num_ranks, 1)))
    multiprocessing.set_forkserver_preload(list(modules))
    try:
        for start in (multiprocessing.resource_tracker.ensure_running, multiprocessing.forkserver.ensure_running):
            with _held_back():
                start()
    except OSError as error:
        raise _no_scratch(error) from None
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


def run_workers(work: Callable[[Order], None], order: Order, num_ranks: int, shutdown_s: int) -> Ended:
    """Run ``work(order)`` in ``num_ranks`` local processes as ranks of one group; return how they ended.

    A signal to this process that asks for an end reaches every worker as SIGTERM, and it has ``shutdown_s`` seconds to
    save; so it has where this process dies. Raises TriaxError where there is no room for what the processes tell each
    other.
    """
    # torchelastic's shared store serves a restarted rank the addresses of the attempt before (pytorch#135712).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig

    from triax.launch.elastic import run_agent

    _silence("torch.distributed.elastic", "torch.multiprocessing.spawn")
    try:
        with _scratch_folder() as scratch, raised_once(SignalException) as uncut:
            config = LaunchConfig(
                min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, run_id="triax", max_restarts=0,
                rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="forkserver", monitor_interval=0.1,
                logs_specs=DefaultLogsSpecs(log_dir=scratch), shutdown_timeout=shutdown_s, local_addr="localhost",
                signals_to_handle="SIGQUIT",
            )  # fmt: skip
            run_agent(config, _be_worker, (work, order, shutdown_s), uncut)
    except ChildFailedError as error:
        return ended({rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException:
        return Ended(REQUEUE)
    return Ended(0)


def _be_worker(work: Callable[[Order], None], order: Order, shutdown_s: int) -> None:
    """In a worker: do the work, and leave where the process that started it is gone.

    Without this a worker would train on where nobody sees it, and never end: its parent is the fork server, which lives
    as long as its children do.
    """
    Thread(target=_follow_parent, args=(shutdown_s,), name="follow-parent", daemon=True).start()
    work(order)


def _follow_parent(shutdown_s: int) -> None:
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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_ENDS, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def raised_once(
    exception: "Callable[[str, signal.Signals], Exception]",
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Let the first signal that asks for an end raise ``exception``, which torchelastic understands, and no other: what
    comes while workers save, such as Ctrl-C once more, must not cut that short. SIGQUIT still does.

    Yield what workers are started and looked after in: there it raises at the end, so that none is started that nobody
    knows of. A hang-up that is ignored (``nohup``) stays ignored.
    """
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = _ENDS if is_nohup else (*_ENDS, signal.SIGHUP)
    is_held: bool = False
    heard: Exception | None = None

    def leave(number: int, _frame: object) -> None:
        nonlocal heard
        if heard is None:
            heard = exception(f"{signal.Signals(number).name} asks for an end", signal.SIGTERM)
            if not is_held:
                raise heard

    @contextmanager
    def uncut() -> Iterator[None]:
        nonlocal is_held
        is_held = True
        try:
            yield
        finally:
            is_held = False
        if heard is not None:
            raise heard

    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield uncut
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _scratch_folder() -> "tempfile.TemporaryDirectory[str]":
    try:
        return tempfile.TemporaryDirectory(prefix="triax-")
    except OSError as error:
        raise _no_scratch(error) from None


def _no_scratch(error: OSError) -> TriaxError:
    # The name of a socket has at most 107 bytes, so a long TMPDIR is a fault too.
    reason = error.strerror or str(error)
    return TriaxError(
        f"ranks cannot be started, since they meet in a temporary folder and none can be made: {reason}; set TMPDIR to "
        f"a folder with a short name and room in it, such as /tmp."
    )


def _silence(*prefixes: str) -> None:
    """Keep torchelastic from telling in its own words what triax tells in one sentence; its modules set levels of their
    own when they are imported."""
    for name in list(logging.Logger.manager.loggerDict):
        if name.startswith(prefixes):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def ended(codes: Mapping[int, int]) -> Ended:
    """Return how workers ended that left with ``codes``, by local rank; a code below zero is a signal."""
    # SIGTERM: torchelastic ends so, once one worker has failed, those that do not go by themselves.
    wordless = {rank: code for rank, code in codes.items() if code not in (*_TOLD, -signal.SIGTERM)}
    return Ended(
        next((code for code in (2, 3, REQUEUE) if code in codes.values()), 1),
        {rank: _death(code) for rank, code in wordless.items()},
    )


def _death(code: int) -> str:
    if code >= 0:
        return f"left with exit code {code}"
    known = -code in {number.value for number in signal.Signals}
    return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
