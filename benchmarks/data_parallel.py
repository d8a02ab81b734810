"""How much of a bare PyTorch loop's speed does the whole of triax keep, stage by stage?

    python benchmarks/data_parallel.py --ranks 2 --json -

Three programs take turns on the same ranks, one step each, so that a noisy machine is noisy to all: triax as it trains
(batches read from prepared tokens, the step, the judgement, metrics written); a bare loop with the same decoder under
``fully_shard`` by hand in the same stage; and the same decoder under DDP. Ratios are of pairs of adjacent steps, the
interval is the central 95 % of bootstrapped medians.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from triax.data.batch import Batches, batches_of
from triax.launch.agent import run_workers, warm_up
from triax.nn.decoder import Decoder
from triax.nn.init import initial_rows
from triax.parallel.launch import peers, process_from_environment
from triax.parallel.mesh import build_mesh
from triax.parallel.place import initialise, make_executor, place
from triax.parallel.tied import TiedEmbedding
from triax.spec.cluster import Cluster
from triax.spec.layout import Layout
from triax.spec.plan import make_plan
from triax.spec.run import Run
from triax.spec.schedule import build
from triax.spec.weights import weights_table
from triax.train.corpus import prepare_tokens
from triax.train.guard import Guard
from triax.train.optimizer import Optimizer
from triax.train.reporter import Reporter
from triax.train.run_folder import RunFolder
from triax.train.step import Stepper
from triax.watch.metrics import StepRecord

CPU = torch.device("cpu")
MICROBATCHES = 2


@dataclasses.dataclass(frozen=True)
class Order:
    """What each rank is told."""

    run: str
    zero: int
    pairs: int
    folder: str


def make_run(folder: Path, ranks: int) -> Run:
    """Return a Llama of 13.8 M parameters on 8 sequences of 256 tokens for each rank."""
    text = folder / "text.txt"
    text.write_text("".join(chr(97 + random.Random(1).randrange(26)) for _ in range(1 << 20)), encoding="utf-8")
    return Run.model_validate(
        {
            "model": {
                "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6,
                "vocab_size": 4096,
            },
            "data": {"train": (str(text),), "seq_len": 256, "cache_dir": str(folder)},
            "train": {"steps": 10**6, "sequences_per_step": 8 * ranks},
            "precision": {"compute": "fp32"},
            "watch": {"tensorboard": True},
        }
    )  # fmt: skip


def triax_steps(run: Run, layout: Layout, batches: Batches, folder: Path) -> Callable[[], None]:
    """Return a function that takes one step as the training loop does."""
    process = process_from_environment()
    mesh = build_mesh(layout, "cpu")
    stages = place(run.model, layout, run.precision, mesh, CPU)
    initialise(stages, run.model, 0, layout)
    optimizer = Optimizer(stages, run.model, run.optimizer, CPU)
    table = build(layout.schedule, 1, 1, layout.microbatches)
    executor = make_executor(table, stages, layout, run.precision, mesh, run.data.seq_len, CPU)
    tied = TiedEmbedding(stages, layout, table)
    data_rank = layout.data_rank(process.rank)
    stepper = Stepper(run, layout, executor, optimizer, batches, tied, mesh, data_rank, CPU)
    plan = make_plan(run, Cluster(cards_per_server=process.world_size), layout)
    reporter = Reporter(plan, RunFolder(folder), process, run.data.seq_len / 2, quiet=True)
    guard = Guard(run.guard, run.model)
    steps = iter(range(10**6))

    def step() -> None:
        number = next(steps)
        first = number * run.sequences_per_step
        report = stepper.take(number, stepper.read_batches(first), asks_stop=False).read()
        assert guard.judge(report).verdict == "commit"
        reading = reporter.meter.read()
        reporter.step(
            StepRecord(
                step=number + 1, tokens=first, loss=report.loss, grad_norm=report.grad_norm, lr=1e-3,
                tokens_in_step=run.tokens_per_step, step_s=60.0, data_s=0.0,
                peak_active_bytes=reading.peak_active_bytes, utilization=reading.utilization,
                sample_hash=batches.step_hash(first, run.sequences_per_step),
            )
        )  # fmt: skip

    return step


def _decoder(run: Run) -> Decoder:
    model = Decoder(run.model)
    for weight in weights_table(run.model):
        model.get_parameter(weight.name).data.copy_(initial_rows(weight, run.model, 0, 0, weight.shape[0]))
    return model


def _microbatches(run: Run, batches: Batches) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    size = 8 // MICROBATCHES
    rank, world = dist.get_rank(), dist.get_world_size()
    cut = (batches.microbatch(0, index, rank, world, size, MICROBATCHES) for index in range(MICROBATCHES))
    arrays = ((batch.tokens, batch.positions, batch.labels) for batch in cut)
    return [tuple(map(torch.from_numpy, triple)) for triple in arrays]  # type: ignore[misc]


def bare_steps(run: Run, zero: int, batches: Batches) -> Callable[[], None]:
    """Return a function that takes one step of a loop as one writes it by hand for this stage."""
    model = _decoder(run)
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
    inner = _decoder(run)
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
        batches = batches_of(
            prepare_tokens(run), seq_len=run.data.seq_len, attend_across_documents=True, eval_sequences=0, seed=0
        )
        degrees = {"dp_replicate": process.world_size} if order.zero == 0 else {"dp_shard": process.world_size}
        layout = Layout(
            zero=order.zero, sequences_per_microbatch=8 // MICROBATCHES, microbatches=MICROBATCHES, **degrees
        )
        programs = {
            "triax": triax_steps(run, layout, batches, Path(order.folder)),
            "bare": bare_steps(run, order.zero, batches),
            "ddp": ddp_steps(run, batches),
        }
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        for turn in range(order.pairs + 2):
            names = list(programs) if turn % 2 else list(reversed(programs))
            for name in names:
                dist.barrier()
                started_s = time.perf_counter()
                programs[name]()
                dist.barrier()
                if turn >= 2:
                    seconds[name].append(time.perf_counter() - started_s)
        if process.rank == 0:
            (Path(order.folder) / "seconds.json").write_text(json.dumps(seconds))


def ratio(other: list[float], ours: list[float]) -> dict[str, float]:
    """Return how many times as fast ``ours`` is as ``other``: median of pairs and its bootstrapped 95 % interval."""
    pairs = [b / a for a, b in zip(ours, other, strict=True)]
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(pairs, k=len(pairs))) for _ in range(2000))
    return {"median": statistics.median(pairs), "low": medians[50], "high": medians[1949]}


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
                run = make_run(Path(scratch), ranks)
                prepare_tokens(run)
                code = run_workers(work, Order(run.model_dump_json(), zero, arguments.pairs, scratch), ranks, 60)
                if code:
                    return code
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
