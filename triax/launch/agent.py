"""How are the ranks of one server started, watched and stopped? By torchelastic, with workers that have torch loaded.

Importing torch costs seconds for each process. A fork server imports it once, while this process still reads its own
arguments, and every worker is then a fork of it.
"""

import logging
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

Order = TypeVar("Order")

REQUEUE: Final = 75
"""Exit code of a worker that was asked to stop and saved its state (EX_TEMPFAIL)."""


def warm_up(*modules: str, num_ranks: int) -> None:
    """Begin to import ``modules`` in the process that ``num_ranks`` workers will be forked from; returns at once."""
    # Read when torch is imported: the ranks share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // num_ranks, 1)))
    multiprocessing.set_forkserver_preload(list(modules))
    multiprocessing.forkserver.ensure_running()


@dataclass(frozen=True, slots=True)
class Ended:
    """How the workers ended."""

    code: int
    """0: all ended well. Otherwise the code of the worker that tells most: 2 bad input, 3 stopped by the guard, 75
    asked to stop and saved, 1 anything else."""
    killed: Mapping[int, str] = field(default_factory=dict)
    """Local ranks that a signal ended and not this process, each with the signal's name."""


def run_workers(work: Callable[[Order], None], order: Order, num_ranks: int, shutdown_s: int) -> Ended:
    """Run ``work(order)`` in ``num_ranks`` local processes as ranks of one group; return how they ended.

    SIGTERM and SIGINT to this process reach every worker, which has ``shutdown_s`` seconds to save.
    """
    # torchelastic's shared store serves a restarted rank the addresses of the attempt before (pytorch#135712).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence("torch.distributed.elastic", "torch.multiprocessing.spawn")
    with tempfile.TemporaryDirectory(prefix="triax-") as scratch:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, run_id="triax", max_restarts=0,
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="forkserver", monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=scratch), shutdown_timeout=shutdown_s, local_addr="localhost",
        )  # fmt: skip
        try:
            elastic_launch(config, work)(order)
        except ChildFailedError as error:
            return _ended({rank: failure.exitcode for rank, failure in error.failures.items()})
        except SignalException:
            return Ended(REQUEUE)
    return Ended(0)


def _silence(*prefixes: str) -> None:
    """Keep torchelastic from telling in its own words what triax tells in one sentence; its modules set levels of their
    own when they are imported."""
    for name in list(logging.Logger.manager.loggerDict):
        if name.startswith(prefixes):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _ended(codes: "dict[int, int]") -> Ended:
    """Return how workers ended that left with ``codes``, by local rank; a code below zero is a signal."""
    killed = {rank: signal.Signals(-code).name for rank, code in codes.items() if code < 0 and -code != signal.SIGTERM}
    return Ended(next((code for code in (2, 3, REQUEUE) if code in codes.values()), 1), killed)
