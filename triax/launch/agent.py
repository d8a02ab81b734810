"""How are the ranks of one server started, watched and stopped? By torchelastic, with workers that have torch loaded.

Importing torch costs seconds for each process. A fork server imports it once, while this process still reads its own
arguments, and every worker is then a fork of it.
"""

import logging
import multiprocessing
import multiprocessing.forkserver
import os
import tempfile
from collections.abc import Callable

from triax.errors import TriaxError

_REQUEUE = 75
"""Exit code of a worker that was asked to stop and saved its state (EX_TEMPFAIL)."""


def warm_up(*modules: str) -> None:
    """Begin to import ``modules`` in the process that workers will be forked from; returns at once."""
    multiprocessing.set_forkserver_preload(list(modules))
    multiprocessing.forkserver.ensure_running()


def run_workers(work: Callable[..., None], arguments: tuple[str, ...], num_ranks: int, shutdown_s: int) -> int:
    """Run ``work(*arguments)`` in ``num_ranks`` local processes as ranks of one group; return the exit code.

    0: all ended well. Otherwise the code of the worker that failed first: 2 bad input, 3 stopped by the guard, 75 asked
    to stop and saved, 1 anything else. SIGTERM and SIGINT to this process reach every worker, which has ``shutdown_s``
    seconds to save.
    """
    # torchelastic's shared store serves a restarted rank the addresses of the attempt before (pytorch#135712).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // num_ranks, 1)))
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="triax-") as scratch:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, run_id="triax", max_restarts=0,
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="forkserver", monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=scratch), shutdown_timeout=shutdown_s, local_addr="localhost",
        )  # fmt: skip
        try:
            elastic_launch(config, work)(*arguments)
        except ChildFailedError as error:
            return _exit_code(error)
        except SignalException:
            return _REQUEUE
    return 0


def _exit_code(error: "Exception") -> int:
    failures = getattr(error, "failures", {})
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    if first.exitcode < 0:
        raise TriaxError(
            f"rank {min(failures, key=lambda rank: failures[rank].timestamp)} was killed by signal {-first.exitcode}; "
            f"start the same command again to go on from the newest checkpoint."
        )
    return int(first.exitcode)
