"""Does a number that is not finite, on one rank in one microbatch, ever reach a weight?"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from tests.harness.ranks import run_ranks
from tests.harness.tolerances import assert_same_bits
from tests.harness.toy import lay, toy_run
from tests.harness.training import Engine, whole
from triax.nn import decoder
from triax.spec.layout import Layout
from triax.spec.run import Run

SICK_MICROBATCH = 1


def nan_loss(loss: Tensor) -> Tensor:
    return loss * math.nan


def infinite_loss(loss: Tensor) -> Tensor:
    return loss + math.inf


def nan_gradient(loss: Tensor) -> Tensor:
    loss.register_hook(lambda gradient: gradient * math.nan)
    return loss


def infinite_gradient(loss: Tensor) -> Tensor:
    loss.register_hook(lambda gradient: gradient * math.inf)
    return loss


Fault = Callable[[Tensor], Tensor]
FAULTS: tuple[Fault, ...] = (nan_loss, infinite_loss, nan_gradient, infinite_gradient)


@dataclass(frozen=True)
class Survived:
    """What one rank saw: the sick step's report, and its own shards before it, after it and after one more step."""

    loss: float
    grad_norm: float
    is_finite: bool
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    later: dict[str, Tensor]
    later_loss: float


@pytest.mark.parametrize(
    ("degrees", "optimizer"),
    [
        ({"dp_replicate": 2, "zero": 0}, "adamw"),
        ({"dp_shard": 2, "zero": 1}, "sgd"),
        ({"dp_shard": 2, "zero": 3}, "adamw"),
        ({"tp": 2}, "adamw"),
        ({"pp": 2, "dp_shard": 2, "zero": 3}, "adamw"),
        pytest.param({"dp_shard": 2, "zero": 2}, "adamw", marks=pytest.mark.exhaustive),
        pytest.param({"dp_replicate": 2, "dp_shard": 2, "zero": 2}, "sgd", marks=pytest.mark.exhaustive),
    ],
    ids=["zero=0 adamw", "zero=1 sgd", "zero=3 adamw", "tp", "pp zero=3", "zero=2 adamw", "2 x 2 zero=2 sgd"],
)
def test_no_rank_changes_a_bit(degrees: dict[str, int], optimizer: str) -> None:
    run = toy_run(
        train={"sequences_per_step": 12},
        precision={"compute": "fp32", "master": "fp32", "reduce": "fp32"},
        optimizer={"name": optimizer},
    )
    layout = lay(run, **degrees)
    assert layout.microbatches > SICK_MICROBATCH + 1
    ranks = run_ranks(survive_each, layout.world_size, run, layout)
    for survived_each, healthy, healthy_loss in ranks:
        for fault, survived, first in zip(FAULTS, survived_each, ranks[0][0], strict=True):
            assert not survived.is_finite
            assert math.isfinite(survived.loss) == (fault in (nan_gradient, infinite_gradient))
            assert math.isfinite(survived.grad_norm) == (fault is infinite_loss)  # which adds no gradient
            assert (str(survived.loss), str(survived.grad_norm)) == (str(first.loss), str(first.grad_norm))
            assert_same_bits(survived.after, survived.before)
            # Nothing of the sick step is left anywhere: the next one is as if it had never been.
            assert survived.later_loss == healthy_loss
            assert_same_bits(survived.later, healthy)


def survive_each(rank: int, world: int, run: Run, layout: Layout) -> tuple[list[Survived], dict[str, Tensor], float]:
    """Return what this rank saw with each fault in step 1, and the state and the loss without that step."""
    survived = [survive(rank, run, layout, fault) for fault in FAULTS]
    engine = Engine(run, layout, rank)
    engine.step(0)
    loss = engine.step(2).loss
    return survived, state(engine), loss


def survive(rank: int, run: Run, layout: Layout, fault: Fault) -> Survived:
    engine = Engine(run, layout, rank)
    engine.step(0)
    before = state(engine)
    with patch.object(decoder, "cross_entropy_sum", sick(decoder.cross_entropy_sum, fault, layout, rank)):
        report = engine.step(1)
    after = state(engine)
    later = engine.step(2)
    return Survived(report.loss, report.grad_norm, report.is_finite, before, after, state(engine), later.loss)


def sick(loss: Callable[..., Tensor], fault: Fault, layout: Layout, rank: int) -> Callable[..., Tensor]:
    """Return ``loss`` with ``fault`` in one microbatch of the last rank."""
    calls = iter(range(1 << 30))

    def sick_loss(*args: Any) -> Tensor:
        is_sick = next(calls) == SICK_MICROBATCH and rank == layout.world_size - 1
        return fault(loss(*args)) if is_sick else loss(*args)

    return sick_loss


def state(engine: Engine) -> dict[str, Tensor]:
    """A copy of all weights, and of everything the optimizer remembers, step counters included."""
    weights = {name: weight for stage in engine.stages for name, weight in stage.named_parameters()}
    return {name: whole(tensor) for name, tensor in (weights | engine.optimizer.state_tensors()).items()}
