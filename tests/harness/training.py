"""How is a toy run trained in a layout, and how on one device by plain PyTorch that shares none of the engine?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.harness.pieces import Pieces, pieces_of, put_together
from tests.harness.ranks import run_ranks
from tests.harness.toy import MadeUpSequences
from triax.parallel.launch import Process
from triax.parallel.place import initialise
from triax.parallel.progress import Progress
from triax.spec.layout import Layout
from triax.spec.run import Run
from triax.spec.weights import weights_table
from triax.train.assemble import assemble
from triax.verify.reference import train_plainly

CPU = torch.device("cpu")

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Trained:
    """What a toy run came to: one loss and norm for each step, and whole weights, by name."""

    losses: list[float]
    grad_norms: list[float]
    first_gradients: dict[str, Tensor]
    """Of the first step, clipped: as the optimizer gets them."""
    weights: dict[str, Tensor]


class Engine:
    """The engine's parts for one rank, as the loop puts them together."""

    def __init__(self, run: Run, layout: Layout, rank: int) -> None:
        self.run, self.layout = run, layout
        self.data_rank = layout.data_rank(rank)
        self.sequences = MadeUpSequences(run.model.vocab_size, run.data.seq_len)
        process = Process(rank, layout.world_size, rank, layout.world_size, CPU)
        nowhere: Any = None  # batches are handed to the stepper
        parts = assemble(run, layout, process, nowhere, Progress())
        self.mesh, self.stages, self.optimizer = parts.mesh, parts.stages, parts.optimizer
        self.executor, self.stepper = parts.executor, parts.stepper
        initialise(self.stages, run.model, run.train.seed, layout)
        self.optimizer.copy_tied()

    def step(self, step: int) -> Any:
        """Take one step and return its report."""
        batches: Any = self.sequences.microbatches(self.run, self.layout, self.data_rank, step)
        return self.stepper.take(step, batches, asks_stop=False).read()


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of the whole tensor, gathered where it is sharded."""
    detached = tensor.detach()
    return (detached.full_tensor() if isinstance(detached, DTensor) else detached).clone()


def train_in_layout(rank: int, world: int, run: Run, layout: Layout, steps: int) -> Trained:
    """Train ``steps`` steps as one rank of ``layout``; return what this rank's stages came to, gathered by torch."""
    return Trained(*_train(rank, run, layout, steps, lambda named: {name: whole(tensor) for name, tensor in named}))


@dataclass(frozen=True)
class TrainedPart:
    """What a toy run came to on one rank: its own parts alone."""

    losses: list[float]
    grad_norms: list[float]
    first_gradients: Pieces
    weights: Pieces


def train_part(rank: int, world: int, run: Run, layout: Layout, steps: int) -> TrainedPart:
    """Train ``steps`` steps as one rank of ``layout``."""
    return TrainedPart(*_train(rank, run, layout, steps, pieces_of))


def _train(
    rank: int, run: Run, layout: Layout, steps: int, keep: Callable[[list[tuple[str, Tensor]]], Kept]
) -> tuple[list[float], list[float], Kept, Kept]:
    engine = Engine(run, layout, rank)
    named = [pair for stage in engine.stages for pair in stage.named_parameters()]
    losses, norms, gradients = [], [], []
    update = engine.optimizer.update

    def record_then_update(rate: float, is_finite: Tensor) -> None:
        if not gradients:
            gradients.append(keep([(name, weight.grad) for name, weight in named if weight.grad is not None]))
        update(rate, is_finite)

    engine.optimizer.update = record_then_update  # type: ignore[method-assign]
    for step in range(steps):
        report = engine.step(step)
        losses.append(report.loss)
        norms.append(report.grad_norm)
    return losses, norms, gradients[0], keep(named)


def train_on_all_ranks(run: Run, layout: Layout, steps: int) -> Trained:
    """Train ``steps`` steps on forked ranks and put their parts together.

    Fails where ranks report other bits, where together they do not hold the whole model, where replicas differ in a
    bit, or where a weight is held by more pipeline ranks than it must be.
    """
    parts = run_ranks(train_part, layout.world_size, run, layout, steps)
    for rank, part in enumerate(parts):
        reported = (part.losses, part.grad_norms)
        assert reported == (parts[0].losses, parts[0].grad_norms), f"rank {rank} reports other numbers than rank 0"
    _assert_each_weight_is_in_one_stage(run, layout, parts)
    gradients = put_together(part.first_gradients for part in parts)
    return Trained(parts[0].losses, parts[0].grad_norms, gradients, put_together(part.weights for part in parts))


def _assert_each_weight_is_in_one_stage(run: Run, layout: Layout, parts: Sequence[TrainedPart]) -> None:
    """A tied embedding may be in two; ranks of one pipeline rank hold parts of the same weights."""
    names = {}
    for rank, part in enumerate(parts):
        pp = layout.coordinate(rank).pp
        assert names.setdefault(pp, part.weights.keys()) == part.weights.keys(), f"pipeline rank {pp} disagrees"
    for name in (weight.name for weight in weights_table(run.model)):
        owners = [pp for pp, held in names.items() if name in held]
        most = 2 if run.model.tie_word_embeddings and name == "embed_tokens.weight" else 1
        assert 1 <= len(owners) <= most, f"{name} is in pipeline ranks {owners}"


def train_in_each(rank: int, world: int, run: Run, layouts: list[Layout], steps: int) -> list[Trained]:
    """Train anew in each of ``layouts``, which have the same number of ranks."""
    return [train_in_layout(rank, world, run, layout, steps) for layout in layouts]


def train_on_one_device(run: Run, steps: int) -> Trained:
    """Train the same run by the plain loop that ``triax verify`` trusts (``triax.verify.reference``)."""
    plain = train_plainly(run, MadeUpSequences(run.model.vocab_size, run.data.seq_len), steps)
    limit = run.optimizer.max_grad_norm
    clipped = min(limit / (plain.grad_norms[0] + 1e-6), 1.0) if limit else 1.0
    first = {name: gradient * clipped for name, gradient in plain.gradients.items()}
    return Trained(plain.losses, plain.grad_norms, first, dict(plain.weights))
