"""How does a test call ``triax`` in its own process, with ranks that are forks and know what the test patched?"""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from typing import Any

import pytest
import torch

from triax.cli import run
from triax.launch.agent import Ended, ended


@dataclass(frozen=True)
class Said:
    """How a command ended."""

    code: int
    out: str
    err: str


def triax(words: Sequence[str], capfd: pytest.CaptureFixture[str]) -> Said:
    """Run ``triax WORDS`` and return how it ended."""
    code = run(words)
    said = capfd.readouterr()
    return Said(code, said.out, said.err)


def fork_workers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Start ranks as forks of this process for the rest of the test, with what it has patched; return a list that grows
    by the number of ranks of each start.

    torchelastic's fork server would know nothing of the test. The rest is as there: the environment of torchrun, a
    first failure that ends the others and alone is told, and the exit codes.
    """
    started: list[int] = []

    def run_workers(work: Callable[[Any], None], order: Any, num_ranks: int, shutdown_s: int) -> Ended:
        started.append(num_ranks)
        context = multiprocessing.get_context("fork")
        port = free_port()
        sys.stdout.flush()
        sys.stderr.flush()
        ranks = [
            context.Process(target=be_worker, args=(work, order, rank, num_ranks, port)) for rank in range(num_ranks)
        ]
        try:
            for process in ranks:
                process.start()
            failed = _first_failed(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return Ended(0) if failed is None else ended({failed: ranks[failed].exitcode or 0})

    monkeypatch.setattr("triax.launch.agent.run_workers", run_workers)
    monkeypatch.setattr("triax.launch.agent.warm_up", lambda *modules, num_ranks: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return started


def _first_failed(ranks: "Sequence[ForkProcess]") -> int | None:
    """Wait for the first rank that fails; None where none does."""
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        for sentinel in wait(list(running)):
            rank = running.pop(sentinel)  # type: ignore[arg-type]
            ranks[rank].join()
            if ranks[rank].exitcode:
                return rank
    return None


def free_port() -> int:
    """Return a port of this machine that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def be_worker(work: Callable[[Any], None], order: Any, rank: int, num_ranks: int, port: int) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(place) for name, place in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    work(order)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
