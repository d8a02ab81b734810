"""How does a test train a whole run, from tokens on disk to checkpoints, on forked ranks, and killed at any step?"""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.harness.faults import Fault
from tests.harness.ranks import RanksFailed, run_ranks
from triax.checkpoint.load import load
from triax.checkpoint.verify import newest_verified
from triax.errors import TriaxError
from triax.nn.decoder import Decoder
from triax.parallel.launch import Process
from triax.spec.cluster import Cluster
from triax.spec.layout import Layout
from triax.spec.plan import make_plan
from triax.spec.run import Run
from triax.train.corpus import prepare_tokens
from triax.train.loop import train
from triax.train.run_folder import RunFolder
from triax.train.step import Stepper
from triax.watch.record import read_metrics


def write_corpus(folder: Path, num_words: int = 6000) -> Path:
    """Write a text of made-up words in many documents, the same every time, and return its path."""
    chance = random.Random(7)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    lines = [" ".join(chance.choices(words, k=chance.randint(1, 40))) for _ in range(num_words // 20)]
    path = folder / "corpus.jsonl"
    path.write_text("".join(f'{{"text": "{line}"}}\n' for line in lines), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Told:
    """How a start of a run ended on one rank: the error's class and message, empty where it reached its last step."""

    error: str = ""
    message: str = ""


def train_as_forked_rank(
    rank: int, world: int, run: Run, layout: Layout, folder: str, killed_at: int | None, faults: Sequence[Fault] = ()
) -> Told:
    """Train as a rank of the harness's process group, with ``faults``; die without a word when step ``killed_at``
    begins."""
    take = Stepper.take

    def take_or_die(self: Stepper, step: int, *args: Any, **kwargs: Any) -> Any:
        if step == killed_at:
            os._exit(9)
        return take(self, step, *args, **kwargs)

    Stepper.take = take_or_die  # type: ignore[method-assign]
    for fault in faults:
        fault(rank)
    plan = make_plan(run, Cluster(cards_per_server=world, peak_flops=1e12), layout)
    process = Process(rank, world, rank, world, torch.device("cpu"))
    try:
        train(plan, RunFolder(Path(folder)), process, prepare_tokens(run), quiet=True)
    except TriaxError as error:
        return Told(type(error).__name__, str(error))
    return Told()


def start(
    run: Run, layout: Layout, folder: Path, *, killed_at: int | None = None, timeout_s: float = 120.0,
    faults: Sequence[Fault] = (),
) -> list[Told]:  # fmt: skip
    """Start ``run`` in ``folder``, or go on with it; return how it ended on each rank."""
    prepare_tokens(run)
    try:
        arguments = (run, layout, str(folder), killed_at, faults)
        return run_ranks(train_as_forked_rank, layout.world_size, *arguments, timeout_s=timeout_s)
    except RanksFailed:
        if killed_at is None:
            raise
        return [Told("killed")] * layout.world_size


def series(folder: Path, key: str) -> list[Any]:
    """Return one metric of every step, as a reader of the run sees it."""
    return [line.get(key) for line in read_metrics(folder)]


def saved_weights(folder: Path, run: Run) -> dict[str, Tensor]:
    """Return the whole weights and optimizer state of the newest checkpoint."""
    checkpoint, passed_over = newest_verified(folder / "checkpoints")
    assert checkpoint is not None, passed_over
    dtypes = {"F32": torch.float32, "F64": torch.float64}
    entries = checkpoint.manifest.tensors
    tensors = {name: torch.empty(entry.shape, dtype=dtypes[entry.dtype]) for name, entry in entries.items()}
    load(checkpoint, tensors)
    assert {name for name, _ in Decoder(run.model).named_parameters()} <= tensors.keys()
    return tensors
