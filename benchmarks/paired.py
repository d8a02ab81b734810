"""How are programs that train the same network compared on a noisy machine? They take turns, one step each.

Every program of a comparison runs on the same ranks with the same weights and the same tokens. Ratios are of pairs of
adjacent steps; their interval is the central 95 % of bootstrapped medians.
"""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from triax.data.batch import Batches, batches_of
from triax.launch.agent import alone, run_workers
from triax.nn.decoder import Decoder
from triax.nn.init import initial_rows
from triax.parallel.launch import Process
from triax.parallel.place import initialise
from triax.parallel.progress import Progress
from triax.spec.cluster import Cluster
from triax.spec.layout import Layout
from triax.spec.plan import make_plan
from triax.spec.run import Run
from triax.spec.weights import weights_table
from triax.train.assemble import assemble
from triax.train.corpus import prepare_tokens
from triax.train.guard import Guard, GuardState
from triax.train.reporter import Reporter
from triax.train.run_folder import RunFolder
from triax.watch.metrics import StepRecord

_WARM_UP = 2
"""Turns that are taken and not counted."""


@dataclass(frozen=True)
class Order:
    """What each rank is told."""

    run: str
    """The run as JSON."""
    layout: str
    """The layout as JSON."""
    pairs: int
    folder: str

    def save(self, seconds: Mapping[str, list[float]]) -> None:
        """Leave what ``take_turns`` returned for the process that started the ranks; rank 0 alone calls this."""
        (Path(self.folder) / "seconds.json").write_text(json.dumps(seconds))


def compare(
    work: Callable[[Order], None], layout: Layout, sequences_per_step: int, pairs: int
) -> tuple[Run, dict[str, list[float]]]:
    """Return the run that the ranks of ``layout`` have trained by ``work``, and what rank 0 has saved of it.

    Ends this process where a rank fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        run = make_run(Path(scratch), sequences_per_step)
        prepare_tokens(run)
        order = Order(run.model_dump_json(), layout.model_dump_json(), pairs, scratch)
        ended = run_workers(work, order, alone(layout.world_size), 60)
        if ended.code:
            raise SystemExit(ended.code)
        seconds: dict[str, list[float]] = json.loads((Path(scratch) / "seconds.json").read_text())
    return run, seconds


def tokens_per_s(run: Run, seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median rate of each program."""
    return {name: run.tokens_per_step / statistics.median(taken) for name, taken in seconds.items()}


def make_run(folder: Path, sequences_per_step: int) -> Run:
    """Return a Llama of 13.8 M parameters on sequences of 256 random letters."""
    text = folder / "text.txt"
    text.write_text("".join(chr(97 + random.Random(1).randrange(26)) for _ in range(1 << 20)), encoding="utf-8")
    return Run.model_validate(
        {
            "model": {
                "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6,
                "vocab_size": 4096,
            },
            "data": {"train": (str(text),), "seq_len": 256, "cache_dir": str(folder)},
            "train": {"steps": 10**6, "sequences_per_step": sequences_per_step},
            "precision": {"compute": "fp32"},
            "watch": {"tensorboard": True},
        }
    )  # fmt: skip


def read_batches(run: Run) -> Batches:
    """Return the samples of ``run``."""
    return batches_of(
        prepare_tokens(run), seq_len=run.data.seq_len, attend_across_documents=True, eval_sequences=0, seed=0
    )


def initial_decoder(run: Run) -> Decoder:
    """Return the network of ``run`` on one device, with the weights it starts from in every layout."""
    model = Decoder(run.model)
    for weight in weights_table(run.model):
        model.get_parameter(weight.name).data.copy_(initial_rows(weight, run.model, 0, 0, weight.shape[0]))
    return model


def triax_steps(run: Run, layout: Layout, process: Process, batches: Batches, folder: Path) -> Callable[[], float]:
    """Return a function that takes one step as the training loop does, and returns its loss."""
    parts = assemble(run, layout, process, batches, Progress())
    initialise(parts.stages, run.model, 0, layout)
    parts.optimizer.copy_tied()
    plan = make_plan(run, Cluster(cards_per_server=process.world_size), layout)
    reporter = Reporter(plan, RunFolder(folder), process, run.data.seq_len / 2, quiet=True)
    guard, state = Guard(run.guard, run.model, run.sequences_per_step), GuardState()
    steps = iter(range(10**6))

    def step() -> float:
        nonlocal state
        number = next(steps)
        first = number * run.sequences_per_step
        bounds = guard.limits(state, newest_is_unread=False)
        report = parts.stepper.take(number, parts.stepper.read_batches(first), asks_stop=False, bounds=bounds).read()
        judgement = guard.judge(report, state, first)
        assert judgement.verdict == "commit"
        state = judgement.state
        reading = reporter.meter.read()
        reporter.step(
            StepRecord(
                step=number + 1, tokens=first, loss=report.loss, grad_norm=report.grad_norm, lr=1e-3,
                tokens_in_step=run.tokens_per_step, step_s=60.0, data_s=0.0,
                peak_active_bytes=reading.peak_active_bytes, utilization=reading.utilization,
                sample_hash=batches.step_hash(first, run.sequences_per_step),
            )
        )  # fmt: skip
        return report.loss

    return step


def take_turns(programs: Mapping[str, Callable[[], object]], pairs: int) -> dict[str, list[float]]:
    """Return the seconds of ``pairs`` steps of each program; all ranks call this together."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(pairs + _WARM_UP):
        names = list(programs)
        for name in names if turn % 2 else reversed(names):
            dist.barrier()
            started_s = time.perf_counter()
            programs[name]()
            dist.barrier()
            if turn >= _WARM_UP:
                seconds[name].append(time.perf_counter() - started_s)
    return seconds


def ratio(other: list[float], ours: list[float]) -> dict[str, float]:
    """Return how many times as fast ``ours`` is as ``other``: median of pairs and its bootstrapped 95 % interval."""
    pairs = [b / a for a, b in zip(ours, other, strict=True)]
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(pairs, k=len(pairs))) for _ in range(2000))
    return {"median": statistics.median(pairs), "low": medians[50], "high": medians[1949]}
