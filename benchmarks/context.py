"""What does it cost to cut sequences over ranks, by each method, against one rank that has them whole?

    python -m benchmarks.context --ranks 2 --seq-len 2048 --json -

Whole steps of the same network take turns (``benchmarks.paired``): one for each ``cp_method``, as triax trains it, and
one on rank 0 alone. Ranks of one machine share its memory bus, and links are its memory: methods that send more are
cheaper here than between servers.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist

from benchmarks.paired import initial_decoder, make_run, ratio, read_batches, take_turns, triax_steps
from triax.data.batch import Batches
from triax.launch.agent import run_workers, warm_up
from triax.parallel.launch import peers, process_from_environment
from triax.spec.layout import ContextMethod, Layout
from triax.spec.run import Run
from triax.train.corpus import prepare_tokens


@dataclasses.dataclass(frozen=True)
class Order:
    """What each rank is told."""

    run: str
    ranks: int
    pairs: int
    folder: str


def alone_steps(run: Run, batches: Batches) -> Callable[[], float]:
    """Return a function with which rank 0 takes the whole step, and the others none."""
    if dist.get_rank() != 0:
        return lambda: float("nan")
    model = initial_decoder(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = batches.microbatch(0, 0, 0, 1, run.sequences_per_step, 1)
    tokens, positions, labels = map(torch.from_numpy, (batch.tokens, batch.positions, batch.labels))

    def step() -> float:
        loss = model(tokens, positions, None, labels) / labels.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def work(order: Order) -> None:
    """Measure on one rank; rank 0 writes what it saw."""
    run = Run.model_validate_json(order.run)
    process = process_from_environment()
    torch.manual_seed(0)
    with peers(process, 300.0):
        batches = read_batches(run)
        programs: dict[str, Callable[[], float]] = {"alone": alone_steps(run, batches)}
        for method in get_args(ContextMethod):
            layout = Layout(cp=order.ranks, cp_method=method, sequences_per_microbatch=run.sequences_per_step)
            programs[method] = triax_steps(run, layout, process, batches, Path(order.folder))
        losses = {name: step() for name, step in programs.items()}
        assert process.rank != 0 or max(losses.values()) - min(losses.values()) < 1e-4, losses
        seconds = take_turns(programs, order.pairs)
        if process.rank == 0:
            (Path(order.folder) / "seconds.json").write_text(json.dumps(seconds))


def main() -> int:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json", default="-")
    arguments = parser.parse_args()
    warm_up("torch", num_ranks=arguments.ranks)
    with tempfile.TemporaryDirectory() as scratch:
        said = make_run(Path(scratch), 1).model_dump()
        said["data"] |= {"seq_len": arguments.seq_len}
        run = Run.model_validate(said)
        prepare_tokens(run)
        order = Order(run.model_dump_json(), arguments.ranks, arguments.pairs, scratch)
        ended = run_workers(work, order, arguments.ranks, 60)
        if ended.code:
            return ended.code
        seconds = json.loads((Path(scratch) / "seconds.json").read_text())
    text = json.dumps(
        {
            "ranks": arguments.ranks,
            "seq_len": arguments.seq_len,
            "pairs": arguments.pairs,
            "tokens_per_s": {name: run.tokens_per_step / statistics.median(s) for name, s in seconds.items()},
            "over_all_gather": {name: ratio(seconds["all_gather"], s) for name, s in seconds.items()},
            "over_one_rank": {name: ratio(seconds["alone"], s) for name, s in seconds.items()},
        },
        indent=1,
    )
    if arguments.json == "-":
        print(text)
    else:
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
