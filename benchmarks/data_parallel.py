"""How much of a bare PyTorch loop's speed does the whole of triax keep, stage by stage?

    python -m benchmarks.data_parallel --ranks 2 --json -

Three programs take turns (``benchmarks.paired``): triax as it trains (batches read from prepared tokens, the step, the
judgement, metrics written); a bare loop with the same decoder under ``fully_shard`` by hand in the same stage; and the
same decoder under DDP.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.output import write_json
from benchmarks.paired import (
    Order,
    compare,
    initial_decoder,
    ratio,
    read_batches,
    take_turns,
    tokens_per_s,
    triax_steps,
)
from triax.data.batch import Batches
from triax.launch.workers import warm_up
from triax.parallel.launch import peers, process_from_environment
from triax.spec.layout import Layout
from triax.spec.run import Run

SEQUENCES = 8
"""Of one step, on each rank."""
MICROBATCHES = 2


def _microbatches(run: Run, batches: Batches) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    size = SEQUENCES // MICROBATCHES
    rank, world = dist.get_rank(), dist.get_world_size()
    cut = (batches.microbatch(0, index, rank, world, size, MICROBATCHES) for index in range(MICROBATCHES))
    arrays = ((batch.tokens, batch.positions, batch.labels) for batch in cut)
    return [tuple(map(torch.from_numpy, triple)) for triple in arrays]  # type: ignore[misc]


def bare_steps(run: Run, zero: int, batches: Batches) -> Callable[[], None]:
    """Return a function that takes one step of a loop as one writes it by hand for this stage."""
    model = initial_decoder(run)
    world = dist.get_world_size()
    mesh = (
        init_device_mesh("cpu", (world, 1), mesh_dim_names=("r", "s"))
        if zero == 0
        else init_device_mesh("cpu", (world,))
    )
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=zero == 3)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    data = _microbatches(run, batches)
    tokens = sum(labels.numel() for _, _, labels in data)

    def step() -> None:
        for index, (x, positions, labels) in enumerate(data):
            last = index == len(data) - 1
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last or zero >= 2)
            model.set_reshard_after_backward(last or zero in (0, 3))
            (model(x, positions, None, labels) / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp_steps(run: Run, batches: Batches) -> Callable[[], None]:
    """Return a function that takes one step under DistributedDataParallel."""
    inner = initial_decoder(run)
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    data = _microbatches(run, batches)
    tokens = sum(labels.numel() for _, _, labels in data)

    def step() -> None:
        for index, (x, positions, labels) in enumerate(data):
            model.require_backward_grad_sync = index == len(data) - 1
            (model(x, positions, None, labels) / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def work(order: Order) -> None:
    """Measure on one rank; rank 0 writes what it saw."""
    run, layout = Run.model_validate_json(order.run), Layout.model_validate_json(order.layout)
    process = process_from_environment()
    with peers(process, 300.0):
        batches = read_batches(run)
        programs = {
            "triax": triax_steps(run, layout, process, batches, Path(order.folder)),
            "bare": bare_steps(run, layout.zero, batches),
            "ddp": ddp_steps(run, batches),
        }
        seconds = take_turns(programs, order.pairs)
        if process.rank == 0:
            order.save(seconds)


def layout_of(zero: int, ranks: int) -> Layout:
    """Return the layout of data parallelism alone in stage ``zero``."""
    degree = {"dp_replicate" if zero == 0 else "dp_shard": ranks}
    step = {"sequences_per_microbatch": SEQUENCES // MICROBATCHES, "microbatches": MICROBATCHES}
    return Layout.model_validate(degree | step | {"zero": zero})


def main() -> int:
    """Print one JSON object: a row for each number of ranks and stage."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", default="-")
    arguments = parser.parse_args()
    warm_up("torch", "torch.distributed.fsdp", num_ranks=max(arguments.ranks))
    rows = []
    for ranks in arguments.ranks:
        for zero in arguments.stages:
            run, seconds = compare(work, layout_of(zero, ranks), SEQUENCES * ranks, arguments.pairs)
            rows.append(
                {
                    "ranks": ranks,
                    "zero": zero,
                    "tokens_per_s": tokens_per_s(run, seconds),
                    "triax_over_bare": ratio(seconds["bare"], seconds["triax"]),
                    "triax_over_ddp": ratio(seconds["ddp"], seconds["triax"]),
                }
            )
    write_json({"pairs": arguments.pairs, "rows": rows}, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
