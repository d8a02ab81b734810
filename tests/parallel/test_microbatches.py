"""Do loss and gradients depend on how a step is cut into microbatches, or on the order of forwards and backwards?"""

from itertools import pairwise
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.harness.ranks import run_ranks
from tests.harness.tolerances import (
    GRADIENT,
    LOSS,
    WEIGHT,
    assert_losses_equal,
    assert_same_bits,
    assert_tensors_equal,
)
from tests.harness.toy import SEQ_LEN, MadeUpSequences, lay, toy_run
from tests.harness.training import CPU, Engine, train_in_each, train_on_one_device, whole
from triax.parallel.place import make_executor
from triax.spec.schedule import build
from triax.train.step import DeviceBatch

SEQUENCES = 12
FP32 = {"compute": "fp32", "master": "fp32", "reduce": "fp32"}


@pytest.mark.parametrize("degrees", [{"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 3}], ids=["zero=1", "zero=3"])
def test_1_2_3_and_6_microbatches_equal_one_device_in_fp64(degrees: dict[str, int]) -> None:
    run = toy_run(train={"sequences_per_step": SEQUENCES})
    layouts = [lay(run, size, **degrees) for size in (6, 3, 2, 1)]
    assert [layout.microbatches for layout in layouts] == [1, 2, 3, 6]
    expected = train_on_one_device(run, 2)
    for trained in run_ranks(train_in_each, 2, run, layouts, 2)[0]:
        assert_losses_equal(trained.losses, expected.losses, "fp64")
        assert_losses_equal(trained.grad_norms, expected.grad_norms, "fp64")  # clipped gradients hide a wrong scale
        assert_tensors_equal(trained.first_gradients, expected.first_gradients, GRADIENT["fp64"])
        assert_tensors_equal(trained.weights, expected.weights, WEIGHT["fp64", "adamw"])


@pytest.mark.parametrize(
    ("optimizer", "peak"),
    [pytest.param("sgd", 3e-2, marks=pytest.mark.exhaustive), ("adamw", 3e-4)],
    ids=["sgd", "adamw"],
)
def test_3_and_6_microbatches_equal_one_after_20_steps_in_fp32(optimizer: str, peak: float) -> None:
    run = toy_run(
        train={"steps": 20, "sequences_per_step": SEQUENCES},
        precision=FP32,
        optimizer={"name": optimizer},
        learning_rate={"peak": peak},
    )
    layouts = [lay(run, size, dp_shard=2, zero=2) for size in (6, 2, 1)]
    one, *several = run_ranks(train_in_each, 2, run, layouts, 20)[0]
    for trained in several:
        assert_losses_equal(trained.losses, one.losses, "fp32")
        assert_losses_equal(trained.grad_norms, one.grad_norms, "fp32")
        assert_tensors_equal(trained.first_gradients, one.first_gradients, GRADIENT["fp32"])
        assert_tensors_equal(trained.weights, one.weights, WEIGHT["fp32", optimizer])


@pytest.mark.parametrize("zero", [1, 3])
def test_any_cut_of_a_step_gives_the_same_gradient(zero: int) -> None:
    """Also cuts into microbatches of unequal sizes, some of them with hardly a token that counts."""
    assert run_ranks(cut_at_random, 1, zero) == [None]


def cut_at_random(rank: int, world: int, zero: int) -> None:
    run = toy_run(train={"sequences_per_step": SEQUENCES})
    engine = Engine(run, lay(run, SEQUENCES, zero=zero), rank)
    loss, gradients = loss_and_gradients(engine, [SEQUENCES])

    @hypothesis.settings(max_examples=15, database=None)
    @given(st.sets(st.integers(1, SEQUENCES - 1)))
    def check(cuts: set[int]) -> None:
        bounds = [0, *sorted(cuts), SEQUENCES]
        sizes = [stop - start for start, stop in pairwise(bounds)]
        other_loss, other_gradients = loss_and_gradients(engine, sizes)
        assert abs(other_loss - loss) <= LOSS["fp64"] * loss
        assert_tensors_equal(other_gradients, gradients, GRADIENT["fp64"])

    check()


def loss_and_gradients(engine: Engine, sizes: list[int]) -> tuple[float, dict[str, Tensor]]:
    """Return what a step with microbatches of ``sizes`` sequences comes to; the engine is left as it was."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    batches: Any = [
        engine.sequences.batch(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)
    ]
    on_device = [DeviceBatch.of(batch, CPU) for batch in batches]
    layout = engine.layout.model_copy(update={"microbatches": len(sizes)})
    table = build(layout.schedule, layout.pp, layout.stages_per_rank, layout.microbatches)
    (stage,) = engine.stages
    executor = make_executor(table, engine.stages, layout, engine.run.precision, engine.mesh, SEQ_LEN, CPU)
    loss = executor.execute(on_device, torch.tensor(1e-2))
    gradients = {name: whole(p.grad) for name, p in stage.named_parameters() if p.grad is not None}
    stage.zero_grad(set_to_none=True)
    return loss.item(), gradients


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_all_forwards_first_gives_the_same_bits(zero: int) -> None:
    """GPipe and 1F1B sum the same gradients in the same order; only activations live longer."""
    run = toy_run(train={"sequences_per_step": 6}, precision=FP32)
    degrees = {"dp_replicate": 2} if zero == 0 else {"dp_shard": 2}
    layouts = [lay(run, **degrees, zero=zero, schedule=schedule) for schedule in ("GPipe", "1F1B")]
    assert layouts[0].microbatches == 3
    for gpipe, one_by_one in run_ranks(train_in_each, 2, run, layouts, 2):
        assert gpipe.losses == one_by_one.losses
        assert gpipe.grad_norms == one_by_one.grad_norms
        assert_same_bits(gpipe.weights, one_by_one.weights)


def test_a_step_again_gives_the_same_bits() -> None:
    run = toy_run(train={"sequences_per_step": 8}, precision=FP32)
    layout = lay(run, dp_replicate=2, dp_shard=2, zero=3)
    (first, again), *_ = run_ranks(train_in_each, 4, run, [layout, layout], 3)
    assert first.losses == again.losses
    assert first.grad_norms == again.grad_norms
    assert_same_bits(first.weights, again.weights)


def test_sequences_differ_in_how_many_tokens_count() -> None:
    """Otherwise a mean of means would pass for a sum over the count."""
    sequences = MadeUpSequences(61)
    counts = [int((sequences.batch(range(i, i + 1)).labels >= 0).sum()) for i in range(SEQUENCES)]
    assert min(counts) < 0.7 * max(counts)
