"""Where must torchelastic's agent do otherwise? No signal cuts a start in half, and who stands still is ended soon."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing.process import BaseProcess
from threading import Timer
from typing import Any, Final

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig

from triax.launch.agent import REQUEUE

_LAST_WORDS_S: Final = 5.0
"""How long ranks have to leave once one has failed: they lose it as a peer, say so and go within two seconds. One that
stands still never goes by itself, and torch would give it 30 seconds."""


def run_agent(
    config: LaunchConfig, entrypoint: Callable[..., None], arguments: tuple[Any, ...],
    uncut: Callable[[], AbstractContextManager[None]],
) -> None:  # fmt: skip
    """Run ``entrypoint(*arguments)`` as ranks of this server until all have ended.

    What ``torch.distributed.launcher.api.launch_agent`` does, with the agent below, which starts and looks after ranks
    in ``uncut()``. Raises ChildFailedError where a rank fails, and what a signal's handler raises once they have left.
    """
    assert config.logs_specs is not None
    assert config.shutdown_timeout is not None
    meeting = RendezvousParameters(
        config.rdzv_backend, config.rdzv_endpoint, config.run_id, config.min_nodes, config.max_nodes, config.local_addr,
        **config.rdzv_configs,
    )  # fmt: skip
    rendezvous = get_rendezvous_handler(meeting)
    spec = WorkerSpec(
        role=config.role, local_world_size=config.nproc_per_node, rdzv_handler=rendezvous, entrypoint=entrypoint,
        args=arguments, max_restarts=config.max_restarts, monitor_interval=config.monitor_interval,
        local_addr=config.local_addr, numa_options=config.numa_options,
    )  # fmt: skip
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    agent = _Agent(spec, config.logs_specs, config.start_method, config.shutdown_timeout, uncut)
    is_asked = False
    try:
        result = agent.run()
    except SignalException:
        is_asked = True
        raise
    finally:
        if not is_asked:  # others of the run may still meet here
            rendezvous.shutdown()
    if result.is_failed():
        raise ChildFailedError(config.role, result.failures)


class _Agent(LocalElasticAgent):
    """Starts and watches the ranks of this server."""

    def __init__(
        self, spec: WorkerSpec, logs_specs: LogsSpecs, start_method: str, shutdown_timeout: int,
        uncut: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        super().__init__(spec, logs_specs, start_method, shutdown_timeout=shutdown_timeout)
        self._uncut = uncut
        self._ranks: list[BaseProcess] = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        others = set(multiprocessing.active_children())
        with self._uncut():
            ids: dict[int, Any] = super()._start_workers(worker_group)
            self._ranks = [process for process in multiprocessing.active_children() if process not in others]
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Where one has failed, torch tells the others to end and waits for them.
        has_failed = any(rank.exitcode not in (None, 0, REQUEUE) for rank in self._ranks)
        with self._uncut(), _after(_LAST_WORDS_S, self._kill) if has_failed else nullcontext():
            result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()


@contextmanager
def _after(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """``act`` where the body of the ``with`` takes longer."""
    timer = Timer(seconds, act)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
