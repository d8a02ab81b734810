"""How much of a bare PyTorch loop's speed does the whole of triax keep, stage by stage?

    python -m benchmarks.data_parallel --ranks 2 --json -

Three programs take turns (``benchmarks.paired``): triax as it trains (batches read from prepared tokens, the step, the
judgement, metrics written); a bare loop with the same decoder under ``fully_shard`` by hand in the same stage; and the
same decoder under DDP.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.paired import initial_decoder, make_run, ratio, read_batches, take_turns, triax_steps
from triax.data.batch import Batches
from triax.launch.agent import run_workers, warm_up
from triax.parallel.launch import peers, process_from_environment
from triax.spec.layout import Layout
from triax.spec.run import Run
from triax.train.corpus import prepare_tokens

MICROBATCHES = 2


@dataclasses.dataclass(frozen=True)
class Order:
    """What each rank is told."""

    run: str
    zero: int
    pairs: int
    folder: str


def _microbatches(run: Run, batches: Batches) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    size = 8 // MICROBATCHES
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
    run = Run.model_validate_json(order.run)
    process = process_from_environment()
    with peers(process, 300.0):
        batches = read_batches(run)
        degree = {"dp_replicate" if order.zero == 0 else "dp_shard": process.world_size}
        step = {"sequences_per_microbatch": 8 // MICROBATCHES, "microbatches": MICROBATCHES}
        layout = Layout.model_validate(degree | step | {"zero": order.zero})
        seconds = take_turns(
            {
                "triax": triax_steps(run, layout, process, batches, Path(order.folder)),
                "bare": bare_steps(run, order.zero, batches),
                "ddp": ddp_steps(run, batches),
            },
            order.pairs,
        )
        if process.rank == 0:
            (Path(order.folder) / "seconds.json").write_text(json.dumps(seconds))


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
            with tempfile.TemporaryDirectory() as scratch:
                run = make_run(Path(scratch), 8 * ranks)
                prepare_tokens(run)
                ended = run_workers(work, Order(run.model_dump_json(), zero, arguments.pairs, scratch), ranks, 60)
                if ended.code:
                    return ended.code
                seconds = json.loads((Path(scratch) / "seconds.json").read_text())
            rows.append(
                {
                    "ranks": ranks,
                    "zero": zero,
                    "tokens_per_s": {name: run.tokens_per_step / statistics.median(s) for name, s in seconds.items()},
                    "triax_over_bare": ratio(seconds["bare"], seconds["triax"]),
                    "triax_over_ddp": ratio(seconds["ddp"], seconds["triax"]),
                }
            )
    text = json.dumps({"pairs": arguments.pairs, "rows": rows}, indent=1)
    if arguments.json == "-":
        print(text)
    else:
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
