"""Does every data-parallel layout train exactly like one device?"""

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

DEGREES: list[dict[str, int]] = [
    *({"dp_replicate": ranks, "zero": 0} for ranks in (2, 4, 8)),
    *({"dp_shard": ranks, "zero": zero} for ranks in (2, 4, 8) for zero in (1, 2, 3)),
    *({"dp_replicate": 2, "dp_shard": ranks, "zero": zero} for ranks in (2, 4) for zero in (1, 2, 3)),
]


@cache
def one_device(run: Run, steps: int) -> Trained:
    return train_on_one_device(run, steps)


def assert_equal(run: Run, layout: Layout, steps: int, precision: str, expected: Trained) -> None:
    for trained in run_ranks(train_in_layout, layout.world_size, run, layout, steps):
        assert_losses_equal(trained.losses, expected.losses, precision)
        assert_losses_equal(trained.grad_norms, expected.grad_norms, precision)
        assert_tensors_equal(trained.first_gradients, expected.first_gradients, GRADIENT[precision])
        assert_tensors_equal(trained.weights, expected.weights, WEIGHT[precision, run.optimizer.name])


@pytest.mark.parametrize("sequences_per_microbatch", [1, 2], ids=["accumulated", "at_once"])
@pytest.mark.parametrize("degrees", DEGREES, ids=lambda degrees: " ".join(f"{k}={v}" for k, v in degrees.items()))
def test_every_stage_equals_one_device_in_fp64(degrees: dict[str, int], sequences_per_microbatch: int) -> None:
    run = toy_run(train={"sequences_per_step": 16}, optimizer={"max_grad_norm": None})
    assert_equal(run, lay(run, sequences_per_microbatch, **degrees), 3, "fp64", one_device(run, 3))
