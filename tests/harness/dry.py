"""What does a rank hold, send and compute in a real step, and what does a dry run say of it?"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.ranks import run_ranks
from tests.harness.toy import MadeUpSequences
from triax.parallel.launch import Process
from triax.parallel.place import initialise
from triax.spec.layout import Layout
from triax.spec.run import Run
from triax.train.assemble import Parts
from triax.verify.observe import Observation, observe
from triax.verify.stand_in import standing_in

CARDS_PER_SERVER = 2
_GLOO_LETS_GO_S = 0.003


@dataclass(frozen=True)
class Step:
    """An observation as plain values, which a forked rank can return."""

    peak_bytes: int
    peaks: list[str]
    """Of each phase: its name, where the peak is, and what is held then."""
    collectives: list[str]
    """In order, without what belongs to the set-up."""
    flops: dict[str, int]
    actions: list[str]


def dry_steps(run: Run, layout: Layout, rank: int) -> Step:
    """Return what a dry run says of ``rank``, on the batches of a real one."""
    with standing_in(rank, layout.world_size):
        return _plain(observe(run, layout, _process(layout, rank), _batches(run, layout, rank), CARDS_PER_SERVER))


def real_steps(run: Run, layouts: list[Layout]) -> list[list[Step]]:
    """Return for each layout, all of as many ranks, what every rank saw of itself in a real step."""
    by_rank = run_ranks(_in_each, layouts[0].world_size, run, layouts)
    return [list(of_layout) for of_layout in zip(*by_rank, strict=True)]


def _in_each(rank: int, world: int, run: Run, layouts: list[Layout]) -> list[Step]:
    return [_real(run, layout, rank) for layout in layouts]


def _real(run: Run, layout: Layout, rank: int) -> Step:
    def fill(parts: Parts) -> None:
        initialise(parts.stages, run.model, run.train.seed, layout)
        parts.optimizer.copy_tied()

    with _Patience():
        batches = _batches(run, layout, rank)
        return _plain(observe(run, layout, _process(layout, rank), batches, CARDS_PER_SERVER, fill))


class _Patience(TorchDispatchMode):
    """Waits after each collective: gloo's threads let go of what they sent a moment after it is over."""

    def __init__(self) -> None:
        super().__init__()
        self._is_due = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self._is_due:
            time.sleep(_GLOO_LETS_GO_S)
        self._is_due = func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def _process(layout: Layout, rank: int) -> Process:
    return Process(rank, layout.world_size, rank, layout.world_size, torch.device("cpu"))


def _batches(run: Run, layout: Layout, rank: int) -> Any:
    sequences = MadeUpSequences(run.model.vocab_size, run.data.seq_len)
    return sequences.microbatches(run, layout, layout.data_rank(rank), step=0)


def _plain(seen: Observation) -> Step:
    return Step(
        seen.peak.peak_bytes,
        [f"{m.phase.name}, {m.module}: {m.peak_bytes} {m.held}" for m in seen.moments],
        [
            f"{c.phase}: {c.kind} over {c.axis} {c.peers} {c.link} {c.dtype} {c.payload_bytes}"
            for c in seen.collectives
            if not c.is_of_setup
        ],
        dict(seen.flops),
        [str(action) for action in seen.actions],
    )
