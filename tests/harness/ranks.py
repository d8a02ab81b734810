"""How does a test run a function on several ranks of one machine, and see the one failure that explains the others?

Ranks are forked from this process, which has torch imported already: a rank is ready in a tenth of a second, where a
fresh interpreter would import for seconds. Forking a process with threads is safe here because OpenMP has no pool to
lose in the parent: tests/conftest.py keeps it at one thread.
"""

import datetime
import faulthandler
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist

# Imported once here so that no rank has to; together they cost more than torch itself.
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

from tests.harness.results import read_result, write_result

Result = TypeVar("Result")
Args = TypeVarTuple("Args")

# After the first failure the others get this long to fail by themselves, so that the message can say what they saw.
_GRACE_S = 3.0
# What gloo says to a rank whose peer has gone or does not answer: an echo of a failure, never its explanation.
_ECHOES = ("Connection reset by peer", "Connection closed by peer", "Broken pipe", "Connection refused", "Timed out")


@dataclass(frozen=True)
class Failure:
    """How one rank failed: in one line, in full (its traceback or stack), and when by the machine's monotonic clock."""

    rank: int
    summary: str
    detail: str
    at_s: float

    @property
    def is_echo(self) -> bool:
        """Whether this rank failed only because another one had gone or did not answer."""
        return any(echo in self.summary for echo in _ECHOES)


class RanksFailed(AssertionError):
    """At least one rank failed. ``failures`` holds all failures, the one that explains the others first; ``results``
    what the ranks that finished have returned, by rank."""

    def __init__(self, failures: list[Failure], results: dict[int, Any]) -> None:
        self.failures = sorted(failures, key=lambda failure: (failure.is_echo, failure.at_s))
        self.results = results
        first, *others = self.failures
        lines = [f"rank {first.rank} {first.summary}", first.detail.rstrip()]
        lines += [f"and rank {other.rank} {other.summary}" for other in others]
        super().__init__("\n".join(lines))


def run_ranks(
    fn: Callable[[int, int, *Args], Result],
    world: int,
    *args: *Args,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> list[Result]:
    """Return what ``fn(rank, world, *args)`` returns on each of ``world`` forked ranks, in rank order.

    Every rank has a gloo process group over all of them, one thread, torch's generator seeded with 0, no CUDA card, and
    RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE set; ``env`` comes on top of these, in the ranks alone. ``fn`` may
    be a closure; what it may return is said in tests/harness/results.py.

    Raises RanksFailed with the traceback of the rank that failed first; also when a rank aborts, leaves without a
    result, or is still running after ``timeout_s`` seconds, then with the place where it stands. No rank outlives the
    call.
    """
    __tracebackhide__ = True  # the rank's traceback is the story, not this function's
    context = multiprocessing.get_context("fork")
    sys.stdout.flush()  # or every rank would print once more what still stands in the buffers
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="triax-ranks-") as name:
        folder = Path(name)
        ranks = [
            context.Process(target=_be_rank, args=(fn, rank, world, args, folder, timeout_s, dict(env or {})))
            for rank in range(world)
        ]
        for rank in range(world):
            _stack_file(folder, rank).touch()
        try:
            for process in ranks:
                process.start()
            failures = _watch(ranks, folder, timeout_s)
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()  # does nothing to a rank that has left
                    process.join()
        failed = {failure.rank for failure in failures}
        results = {rank: read_result(_result_file(folder, rank)) for rank in range(world) if rank not in failed}
    if failures:
        raise RanksFailed(failures, results)
    return [results[rank] for rank in range(world)]


def _watch(ranks: list[ForkProcess], folder: Path, timeout_s: float) -> list[Failure]:
    """Return the failures once every rank has left, ``timeout_s`` is over, or the grace after a first failure is."""
    deadline_s = time.monotonic() + timeout_s
    failures: list[Failure] = []
    running = dict(enumerate(ranks))
    while running and (remaining_s := deadline_s - time.monotonic()) > 0:
        wait([process.sentinel for process in running.values()], timeout=remaining_s)
        for rank, process in list(running.items()):
            if process.exitcode is None:
                continue
            del running[rank]
            failure = _failure_of(rank, process.exitcode, folder)
            if failure and not failures:
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
            failures += [failure] if failure else []
    how_long = f"{_GRACE_S:g} s after another had failed" if failures else f"after {timeout_s:g} s"
    for rank, process in running.items():
        stack = _stack_now(process, _stack_file(folder, rank))
        failures.append(Failure(rank, f"was still running {how_long}", stack, time.monotonic()))
    return failures


def _failure_of(rank: int, exit_code: int, folder: Path) -> Failure | None:
    """Return how a rank that has left failed, or None if it did its work."""
    if _failure_file(folder, rank).exists():
        return Failure(**json.loads(_failure_file(folder, rank).read_text()))
    if exit_code == 0 and _result_file(folder, rank).exists():
        return None
    how = f"died by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"left with exit code {exit_code}"
    return Failure(rank, f"{how} and without a result", _stack_of(_stack_file(folder, rank)), time.monotonic())


def _stack_now(process: ForkProcess, stack_file: Path) -> str:
    """Ask a running rank where it stands; it answers even from inside a C call, and not at all if it is frozen."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGUSR1)
    asked_s = time.monotonic()
    while stack_file.stat().st_size == 0 and time.monotonic() < asked_s + 1:
        time.sleep(0.02)
    time.sleep(0.05)  # the answer is written line by line
    return _stack_of(stack_file)


def _stack_of(stack_file: Path) -> str:
    """Return the stack a rank left, down to this harness: what lies below are the frames of the test runner."""
    lines = stack_file.read_text().splitlines()
    below = (
        i for i, line in enumerate(lines) if line.endswith(" in _be_rank") or line.startswith("Extension modules:")
    )
    return "\n".join(lines[: next(below, len(lines))])


def _be_rank(
    fn: Callable[..., object],
    rank: int,
    world: int,
    args: tuple[object, ...],
    folder: Path,
    timeout_s: float,
    env: dict[str, str],
) -> None:
    """Be one rank, from the fork to the exit. Never returns, so that nothing of the parent's is torn down twice."""
    exit_code = 1
    try:
        # A rank whose parent was killed ends itself.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil(timeout_s) + 30)
        stack_file = _stack_file(folder, rank).open("a")
        faulthandler.enable(stack_file)  # where an abort happened; gloo aborts in threads of its own, so all are shown
        faulthandler.register(signal.SIGUSR1, stack_file)  # where a hang is
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({name: str(place) for name, place in places.items()})
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME=loopback)
        os.environ.update(env)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        # A file instead of a port: nothing to search for and nothing to collide with. The group gives up before the
        # harness does, so that a rank that waits in vain says for what.
        store = dist.FileStore(str(folder / "rendezvous"), world)
        patience = datetime.timedelta(seconds=max(1.0, 0.75 * timeout_s))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
        write_result(fn(rank, world, *args), _result_file(folder, rank))
        if dist.is_initialized():
            dist.barrier()  # a rank that leaves early would cut the connections its peers still use
        exit_code = 0
    except BaseException as error:
        at_s = time.monotonic()
        below_this_function = error.__traceback__ and error.__traceback__.tb_next
        detail = "".join(traceback.format_exception(type(error), error, below_this_function))
        summary = "raised " + "".join(traceback.format_exception_only(error)).strip().split("\n")[0]
        _failure_file(folder, rank).write_text(json.dumps(asdict(Failure(rank, summary, detail, at_s))))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def _result_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.safetensors"


def _failure_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.failure.json"


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.stack"
