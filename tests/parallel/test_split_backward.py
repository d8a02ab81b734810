"""Do backwards that are split in two add their gradients up in the reduce precision?"""

import pytest

from tests.harness.ranks import run_ranks
from tests.harness.tolerances import assert_losses_equal
from tests.harness.toy import lay, toy_run
from tests.harness.training import train_in_layout


@pytest.mark.parametrize("zero", [1, 2])
def test_in_bf16_they_come_to_the_losses_of_whole_ones(zero: int) -> None:
    """The head has its gradient before the other weights have theirs, in another dtype."""
    precision = {"compute": "bf16", "master": "fp32", "reduce": "fp32"}
    run = toy_run(precision=precision, train={"sequences_per_step": 12}, learning_rate={"peak": 1e-3})
    whole = lay(run, 2, pp=2, dp_shard=2, zero=zero)
    split = lay(run, 2, pp=2, dp_shard=2, zero=zero, schedule="InterleavedZeroBubble")
    expected = run_ranks(train_in_layout, 4, run, whole, 3)[0]
    actual = run_ranks(train_in_layout, 4, run, split, 3)[0]
    assert_losses_equal(actual.losses, expected.losses, "bf16")
    assert_losses_equal(actual.grad_norms, expected.grad_norms, "bf16")
