"""How does a test call ``triax`` in its own process, with ranks that are forks and know what the test patched?"""

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from triax.cli import run
from triax.launch.workers import Workers


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

    A fork server would know nothing of the test. All the rest is as it is for a user.
    """
    started: list[int] = []

    class Forked(Workers):
        def __init__(self, work: Any, order: Any, environments: Sequence[Mapping[str, str]], shutdown_s: float) -> None:
            started.append(len(environments))
            sys.stdout.flush()
            sys.stderr.flush()
            super().__init__(_work_alone, (work, order), environments, shutdown_s)

    monkeypatch.setattr("triax.launch.workers.START_METHOD", "fork")
    monkeypatch.setattr("triax.launch.agent.Workers", Forked)
    monkeypatch.setattr("triax.launch.workers.warm_up", lambda *modules, num_ranks: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return started


def _work_alone(order: tuple[Callable[[Any], None], Any]) -> None:
    """Be a rank, and leave without what this process would do at its own end."""
    work, inner = order
    torch.set_num_threads(1)
    work(inner)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


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
