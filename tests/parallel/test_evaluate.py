"""Does an evaluation between steps see the newest weights, and leave no trace in the training?"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.harness.ranks import run_ranks
from tests.harness.tolerances import assert_losses_equal
from tests.harness.toy import ODD, lay, toy_run
from tests.harness.training import CPU, Engine
from triax.parallel.reduce import mean_over_ranks
from triax.spec.layout import Layout
from triax.spec.run import Run
from triax.train.step import DeviceBatch

HELD_OUT = range(900, 908)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_evaluation_equals_one_rank_and_changes_no_training(zero: int) -> None:
    run = toy_run(train={"sequences_per_step": 8})
    one = lay(run, 4, zero=3)
    degrees = {"dp_replicate": 2} if zero == 0 else {"dp_shard": 2}
    ((expected, expected_training),) = run_ranks(train_and_evaluate, 1, run, one, True)
    assert len(set(expected)) == len(expected), "each step changes what is measured"
    ranks = run_ranks(train_and_evaluate, 2, run, lay(run, 2, **degrees, zero=zero), True)
    for measured, training in ranks:
        assert_losses_equal(measured, expected, "fp64")
        assert_losses_equal(training, expected_training, "fp64")
    undisturbed = run_ranks(train_and_evaluate, 2, run, lay(run, 2, **degrees, zero=zero), False)
    assert [training for _, training in ranks] == [training for _, training in undisturbed]


def train_and_evaluate(
    rank: int, world: int, run: Run, layout: Layout, evaluates: bool
) -> tuple[list[float], list[float]]:
    """Return the loss per held-out sequence before each of three steps, and the loss of each step."""
    engine = Engine(run, layout, rank)
    share = len(HELD_OUT) // world
    mine: Any = engine.sequences.batch(HELD_OUT[rank * share : (rank + 1) * share])
    measured, training = [], []
    for step in range(3):
        if evaluates:
            loss = engine.executor.evaluate([DeviceBatch.of(mine, CPU)])
            dist.all_reduce(loss)
            measured.append(float(loss) / len(HELD_OUT))
            for parameter in (each for stage in engine.stages for each in stage.parameters()):
                assert isinstance(parameter, DTensor), "gathered weights would be saved, and would outlive a rollback"
                assert parameter.grad is None
        training.append(engine.step(step).loss)
    assert torch.is_grad_enabled()
    return measured, training


@pytest.mark.parametrize(
    "degrees",
    [
        {"tp": 2},
        {"pp": 2, "zero": 3},
        {"pp": 2, "schedule": "DualPipeV", "stages_per_rank": 2},
        {"pp": 2, "dp_shard": 2, "schedule": "Interleaved1F1B", "stages_per_rank": 2, "zero": 2},
    ],
    ids=lambda degrees: " ".join(f"{key}={value}" for key, value in degrees.items()),
)
def test_cut_matrices_and_networks_evaluate_as_one_rank_does(degrees: dict[str, int]) -> None:
    """Also more microbatches than a pipeline has under way at once, and between two steps."""
    run = toy_run(ODD.model_copy(update={"num_hidden_layers": 5}), train={"sequences_per_step": 8})
    ((expected, expected_training),) = run_ranks(evaluate_long, 1, run, lay(run, 4, zero=3))
    layout = lay(run, 2, **degrees)
    for measured, training in run_ranks(evaluate_long, layout.world_size, run, layout):
        assert_losses_equal(measured, expected, "fp64")
        assert_losses_equal(training, expected_training, "fp64")


def evaluate_long(rank: int, world: int, run: Run, layout: Layout) -> tuple[list[float], list[float]]:
    """Return the mean loss of 36 held-out sequences before each of two steps, and the losses of these."""
    engine = Engine(run, layout, rank)
    size = layout.sequences_per_microbatch
    mine = range(900 + engine.data_rank * size, 936, layout.data_ranks * size)
    batches: Any = [engine.sequences.batch(range(first, first + size)) for first in mine]
    count = sum(int((batch.labels >= 0).sum()) for batch in batches)
    measured, training = [], []
    for step in range(2):
        on_device = [DeviceBatch.of(batch, CPU) for batch in batches]
        measured.append(mean_over_ranks(engine.executor.evaluate(on_device), count, layout))
        training.append(engine.step(step).loss)
    return measured, training
