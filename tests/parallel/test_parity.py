"""Does every data-parallel layout train exactly like one device?

fp64 is the main proof. A fixed, varied sample of its matrix of layouts always runs; the whole of it is exhaustive.
"""

from functools import cache
from typing import Any

import pytest

from tests.harness.ranks import run_ranks
from tests.harness.tolerances import GRADIENT, WEIGHT, assert_losses_equal, assert_tensors_equal
from tests.harness.toy import lay, toy_run
from tests.harness.training import Trained, train_in_layout, train_on_one_device
from triax.spec.layout import Layout
from triax.spec.run import Run

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp64": {"compute": "fp64", "master": "fp64", "reduce": "fp64"},
    "fp32": {"compute": "fp32", "master": "fp32", "reduce": "fp32"},
    "bf16": {"compute": "bf16", "master": "fp32", "reduce": "fp32"},
}

Degrees = dict[str, int]
DEGREES: list[Degrees] = [
    *({"dp_shard": 1, "zero": zero} for zero in (0, 1, 2, 3)),
    *({"dp_replicate": ranks, "zero": 0} for ranks in (2, 4, 8)),
    *({"dp_shard": ranks, "zero": zero} for ranks in (2, 4, 8) for zero in (1, 2, 3)),
    *({"dp_replicate": 2, "dp_shard": ranks, "zero": zero} for ranks in (2, 4) for zero in (1, 2, 3)),
]

ALWAYS: list[tuple[Degrees, int]] = [
    ({"dp_shard": 1, "zero": 3}, 2),
    ({"dp_replicate": 4, "zero": 0}, 1),
    ({"dp_shard": 2, "zero": 1}, 1),
    ({"dp_shard": 4, "zero": 2}, 1),
    ({"dp_shard": 4, "zero": 3}, 2),
    ({"dp_shard": 8, "zero": 3}, 1),
    ({"dp_replicate": 2, "dp_shard": 2, "zero": 1}, 1),
    ({"dp_replicate": 2, "dp_shard": 2, "zero": 3}, 1),
    ({"dp_replicate": 2, "dp_shard": 4, "zero": 2}, 2),
]
"""Each stage, each number of ranks, each kind of mesh, with one and with several microbatches."""


def text(degrees: Degrees) -> str:
    return " ".join(f"{key}={value}" for key, value in degrees.items())


def matrix() -> list[Any]:
    return [
        pytest.param(
            degrees,
            sequences,
            id=f"{text(degrees)} {sequences} sequences",
            marks=() if (degrees, sequences) in ALWAYS else pytest.mark.exhaustive,
        )
        for degrees in DEGREES
        for sequences in (1, 2)
    ]


@cache
def one_device(run: Run, steps: int) -> Trained:
    return train_on_one_device(run, steps)


@cache
def one_rank(run: Run, sequences_per_microbatch: int, steps: int) -> Trained:
    (trained,) = run_ranks(train_in_layout, 1, run, lay(run, sequences_per_microbatch), steps)
    return trained


def assert_equal(run: Run, layout: Layout, steps: int, precision: str, expected: Trained) -> None:
    for trained in run_ranks(train_in_layout, layout.world_size, run, layout, steps):
        assert_losses_equal(trained.losses, expected.losses, precision)
        assert_losses_equal(trained.grad_norms, expected.grad_norms, precision)
        assert_tensors_equal(trained.first_gradients, expected.first_gradients, GRADIENT[precision])
        assert_tensors_equal(trained.weights, expected.weights, WEIGHT[precision, run.optimizer.name])


@pytest.mark.parametrize(("degrees", "sequences_per_microbatch"), matrix())
def test_every_stage_equals_one_device_in_fp64(degrees: Degrees, sequences_per_microbatch: int) -> None:
    run = toy_run(train={"sequences_per_step": 16})
    expected = one_device(run, 3)
    assert_clips(run, expected)
    assert_equal(run, lay(run, sequences_per_microbatch, **degrees), 3, "fp64", expected)


@pytest.mark.parametrize(
    ("degrees", "order"),
    [
        ({"dp_replicate": 2, "dp_shard": 2, "zero": 3}, ("dp_shard", "dp_replicate", "pp", "cp", "tp")),
        ({"dp_replicate": 2, "dp_shard": 4, "zero": 1}, ("tp", "dp_shard", "cp", "dp_replicate", "pp")),
    ],
    ids=["2 x 2", "2 x 4"],
)
def test_the_order_of_axes_changes_nothing(degrees: Degrees, order: tuple[str, ...]) -> None:
    run = toy_run(train={"sequences_per_step": 16})
    layout = lay(run, **degrees, order=order)
    assert layout.peers(0, "dp_replicate") == (0, 1), "replicas are neighbours, which they are not by default"
    assert_equal(run, layout, 2, "fp64", one_device(run, 2))


def run_of_20_steps(precision: str, optimizer: str, max_grad_norm: float | None) -> Run:
    return toy_run(
        train={"steps": 20, "sequences_per_step": 8},
        precision=PRECISIONS[precision],
        optimizer={"name": optimizer, "max_grad_norm": max_grad_norm},
        learning_rate={"peak": 3e-4 if optimizer == "adamw" else 3e-2},
    )


def assert_clips(run: Run, trained: Trained) -> None:
    """Fail where ``max_grad_norm`` would not have been tested, because no gradient was longer."""
    limit = run.optimizer.max_grad_norm
    assert limit is None or min(trained.grad_norms) > limit


@pytest.mark.parametrize("max_grad_norm", [None, 0.3], ids=["free", "clipped"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "degrees",
    [
        {"dp_shard": 2, "zero": 1},
        pytest.param({"dp_replicate": 4, "zero": 0}, marks=pytest.mark.exhaustive),
        pytest.param({"dp_shard": 4, "zero": 3}, marks=pytest.mark.exhaustive),
        {"dp_replicate": 2, "dp_shard": 2, "zero": 2},
    ],
    ids=text,
)
def test_20_steps_in_fp32_equal_one_device(degrees: Degrees, optimizer: str, max_grad_norm: float | None) -> None:
    run = run_of_20_steps("fp32", optimizer, max_grad_norm)
    expected = one_device(run, 20)
    assert_clips(run, expected)
    assert_equal(run, lay(run, **degrees), 20, "fp32", expected)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param({"dp_replicate": 2, "zero": 0}, marks=pytest.mark.exhaustive),
        {"dp_shard": 4, "zero": 3},
        pytest.param({"dp_replicate": 2, "dp_shard": 2, "zero": 1}, marks=pytest.mark.exhaustive),
    ],
    ids=text,
)
def test_20_steps_in_bf16_equal_one_rank(degrees: Degrees, optimizer: str) -> None:
    """With the same microbatches: gradients leave each of them rounded to bf16, and that alone is more than the
    tolerance away from the true ones, here as in plain PyTorch."""
    run = run_of_20_steps("bf16", optimizer, 0.3)
    assert_equal(run, lay(run, **degrees), 20, "bf16", one_rank(run, 1, 20))


def test_bf16_is_as_near_to_the_truth_as_plain_pytorch() -> None:
    """Losses, norms and weights after 20 steps equal a plain bf16 loop by the table. First gradients of both are off
    by the rounding of bf16, the engine's by no more."""
    run = run_of_20_steps("bf16", "sgd", None)
    engine, plain = one_rank(run, 1, 20), one_device(run, 20)
    assert_losses_equal(engine.losses, plain.losses, "bf16")
    assert_losses_equal(engine.grad_norms, plain.grad_norms, "bf16")
    assert_tensors_equal(engine.weights, plain.weights, WEIGHT["bf16", "sgd"])
    truth = one_device(run_of_20_steps("fp64", "sgd", None), 1)
    assert distance(engine, truth) <= 1.1 * distance(plain, truth)


def distance(one: Trained, other: Trained) -> float:
    """Return the norm of the difference of the first gradients, over all weights."""
    squares = [(one.first_gradients[name] - other.first_gradients[name]).square().sum() for name in one.first_gradients]
    return float(sum(squares)) ** 0.5
