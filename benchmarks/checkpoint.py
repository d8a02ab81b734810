"""For how long does a save hold up training, and how much slower are steps while it is written?

    python -m benchmarks.checkpoint [--ranks 1] [--rounds 6] [--sequences 8] [--folder FOLDER] [--json FILE]

Ways to save take turns in one run, on the same ranks and the same state, in another order each round, each beside a
plain step of its own: triax in the background, triax waited for, torch's own asynchronous save (DCP), and triax's copy
in memory. Stall is what the call that saves takes and what the next update waits for the copy, on the slowest rank, as
a part of one plain step; slowdown is a step that begins while the write goes on, against the plain one of the same
turn. The bare copy of the state to host memory that is there already is what a save that copies while training waits
cannot do without. Last, what a restart waits for is timed: the newest state found, checked and loaded, from the disk
and from memory. ``costs`` is what benchmarks.goodput reads: of the save in the background, and of loading from disk.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.output import write_json
from benchmarks.paired import Order, compare, read_batches
from triax.checkpoint.agree import Ranks
from triax.checkpoint.load import load
from triax.checkpoint.memory_find import Memory
from triax.checkpoint.memory_folder import Servers, memory_folder
from triax.checkpoint.memory_save import MemoryWriter
from triax.checkpoint.save import CheckpointWriter
from triax.checkpoint.state import local_slices
from triax.checkpoint.verify import newest_verified
from triax.parallel.launch import peers, process_from_environment
from triax.parallel.place import initialise
from triax.parallel.progress import Progress
from triax.spec.layout import Layout
from triax.spec.run import Run
from triax.train.assemble import assemble
from triax.train.optimizer import Optimizer
from triax.train.state import tensors_of

WARM_UP = 1
"""Rounds that are taken and not counted: buffers are made in them."""
RESTARTS = 5


@dataclass(frozen=True)
class Way:
    """One way to save: ``begin`` is what training waits for, ``is_done`` whether the write has ended."""

    begin: Callable[[int], None]
    is_done: Callable[[], bool]


def work(order: Order) -> None:
    """Be one rank; rank 0 leaves the seconds of all ways."""
    run, layout = Run.model_validate_json(order.run), Layout.model_validate_json(order.layout)
    process = process_from_environment()
    with peers(process, 600):
        parts = assemble(run, layout, process, read_batches(run), Progress())
        initialise(parts.stages, run.model, 0, layout)
        parts.optimizer.copy_tied()
        steps = iter(range(10**6))

        def step() -> float:
            number = next(steps)
            batches = parts.stepper.read_batches(number * run.sequences_per_step)
            dist.barrier()
            began_s = time.perf_counter()
            parts.stepper.take(number, batches, asks_stop=False).read()
            return time.perf_counter() - began_s

        step()
        tensors = tensors_of(parts.stages, parts.optimizer)
        home = Path(os.environ["TRIAX_BENCHMARK_FOLDER"])
        seconds = _measure(tensors, parts.optimizer, step, home, process.world_size, order.pairs)
        held = sum(piece.local.nbytes for tensor in tensors.values() for piece in local_slices(tensor))
        seconds["bytes_per_rank"] = [float(Ranks.of(dist.group.WORLD).maxima(held)[0])]
        if process.rank == 0:
            order.save(seconds)


def _measure(
    tensors: Mapping[str, Tensor],
    optimizer: Optimizer,
    step: Callable[[], float],
    home: Path,
    world_size: int,
    rounds: int,
) -> dict[str, list[float]]:
    group = dist.new_group(backend="gloo")
    ranks, servers = Ranks.of(group), Servers(world_size, world_size)
    disk = CheckpointWriter(home / "triax", group, keep=1, run="benchmark")
    waited = CheckpointWriter(home / "waited", group, keep=1, run="benchmark")
    disk.begin_history(0)
    folder = memory_folder(home / "triax", "benchmark")
    memory = MemoryWriter(folder, ranks, servers, None, "benchmark", lambda: disk.history)
    held: list[float] = []

    def hold() -> None:
        began_s = time.perf_counter()
        disk.wait_until_copied()
        memory.wait_until_copied()
        held.append(time.perf_counter() - began_s)

    optimizer.before_update = hold
    ways = {
        "background": Way(lambda n: _none(disk.save(n, tensors, {}, beside=True)), lambda: disk.poll() is not None),
        "waited": Way(lambda n: _none(waited.save(n, tensors, {}, wait=True)), lambda: True),
        "dcp_async": _dcp(tensors, home / "dcp", group),
        "memory": Way(lambda n: memory.save(n, tensors, {}), lambda: memory.poll() is not None),
    }
    copy_to = [torch.empty_like(piece.local) for tensor in tensors.values() for piece in local_slices(tensor)]
    seconds: dict[str, list[float]] = {"copy": [], "step": []}
    for number in range(1, rounds + WARM_UP + 1):
        names = list(ways) if number % 2 else list(reversed(ways))
        told = {"copy": [_slowest(ranks, _copy(tensors, copy_to))]}
        for name in names:
            told |= {f"{name}/{what}": values for what, values in _turn(ways[name], number, step, ranks, held).items()}
        if number > WARM_UP:
            for name, values in told.items():
                seconds.setdefault(name, []).extend(values)
                if name.endswith("/plain"):
                    seconds["step"].extend(values)
    for _ in range(RESTARTS):
        restarts: dict[str, Callable[[], None]] = {
            "restart_disk": lambda: _from_disk(home / "triax", tensors, group),
            "restart_memory": lambda: _from_memory(folder, home / "triax", ranks, servers, tensors, group),
        }
        for name, restart in restarts.items():
            dist.barrier()
            began_s = time.perf_counter()
            restart()
            seconds.setdefault(name, []).append(_slowest(ranks, time.perf_counter() - began_s))
    memory.close()
    return seconds


def _turn(way: Way, number: int, step: Callable[[], float], ranks: Ranks, held: list[float]) -> dict[str, list[float]]:
    plain_s = _slowest(ranks, step())
    dist.barrier()
    began_s = time.perf_counter()
    way.begin(number)
    begin_s = time.perf_counter() - began_s
    held.clear()
    beside = []
    is_done = False
    while not is_done:
        beside.append(_slowest(ranks, step()))
        is_done = not any(ranks.maxima(not way.is_done()))
    write_s = time.perf_counter() - began_s
    stall_s = _slowest(ranks, begin_s + held[0])
    # Only the first step is sure to have had the write beside it from its beginning.
    return {"plain": [plain_s], "stall": [stall_s], "beside": beside[:1], "steps_beside": [float(len(beside))],
            "until_done": [write_s]}  # fmt: skip


def _dcp(tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup) -> Way:
    newest: list[Future[Any]] = []

    def begin(number: int) -> None:
        shutil.rmtree(folder / str(number - 2), ignore_errors=True)
        future = dcp.async_save(dict(tensors), checkpoint_id=str(folder / str(number)), process_group=group)
        assert isinstance(future, Future)
        newest[:] = [future]

    def is_done() -> bool:
        if newest[0].done():
            newest[0].result()
            return True
        return False

    return Way(begin, is_done)


def _copy(tensors: Mapping[str, Tensor], into: list[Tensor]) -> float:
    began_s = time.perf_counter()
    pieces = [piece.local for tensor in tensors.values() for piece in local_slices(tensor)]
    for target, source in zip(into, pieces, strict=True):
        target.copy_(source)
    return time.perf_counter() - began_s


def _from_disk(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    checkpoint, _ = newest_verified(folder, group)
    assert checkpoint is not None
    load(checkpoint, tensors, group)


def _from_memory(
    folder: Path, disk: Path, ranks: Ranks, servers: Servers, tensors: Mapping[str, Tensor], group: dist.ProcessGroup
) -> None:
    checkpoint, passed_over = Memory(folder, disk, ranks, servers, "benchmark").newest(0, tensors)
    assert checkpoint is not None, passed_over
    load(checkpoint, tensors, group)


def _slowest(ranks: Ranks, seconds: float) -> float:
    return ranks.maxima(int(seconds * 1e9))[0] / 1e9


def _none(_: object) -> None:
    """Take an outcome and leave it."""


def figures(seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the medians of stalls and slowdowns, each turn against its own plain step, and all that was measured."""
    step_s, copy_s = statistics.median(seconds["step"]), statistics.median(seconds["copy"])
    ways = {}
    for name in ("background", "waited", "dcp_async", "memory"):
        plain, stall, beside = (seconds[f"{name}/{what}"] for what in ("plain", "stall", "beside"))
        ways[name] = {
            "stall_s": statistics.median(stall),
            "stall_of_step": statistics.median(a / b for a, b in zip(stall, plain, strict=True)),
            "stall_of_step_worst": max(a / b for a, b in zip(stall, plain, strict=True)),
            "slowdown_beside": statistics.median(a / b for a, b in zip(beside, plain, strict=True)),
            "until_done_s": statistics.median(seconds[f"{name}/until_done"]),
        }
    costs = {
        "stall_s": ways["background"]["stall_s"],
        "write_s": ways["background"]["until_done_s"],
        "load_s": statistics.median(seconds["restart_disk"]),
        "bytes_per_rank": seconds["bytes_per_rank"][0],
    }
    return {
        "costs": costs,
        "step_s": step_s, "bare_copy_s": copy_s, "copies_in_a_step": step_s / copy_s, "ways": ways,
        "restart_s": {where: statistics.median(seconds[f"restart_{where}"]) for where in ("disk", "memory")},
        "seconds": dict(seconds),
    }  # fmt: skip


def main() -> None:
    """Measure, and print or write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=8, help="of 256 tokens, in a step")
    parser.add_argument("--folder", help="where to save; absent: the system's folder for temporary files")
    parser.add_argument("--json", default="-", metavar="FILE|-")
    asked = parser.parse_args()
    layout = Layout(dp_shard=asked.ranks, zero=3, sequences_per_microbatch=max(asked.sequences // asked.ranks, 1))
    with tempfile.TemporaryDirectory(dir=asked.folder) as home:
        os.environ["TRIAX_BENCHMARK_FOLDER"] = home
        run, seconds = compare(work, layout, asked.sequences, asked.rounds)
    found = figures(seconds)
    write_json({"format_version": 1, "ranks": asked.ranks, "tokens_per_step": run.tokens_per_step, **found}, asked.json)
    if asked.json != "-":
        print(json.dumps({key: value for key, value in found.items() if key != "seconds"}, indent=1))


if __name__ == "__main__":
    main()
