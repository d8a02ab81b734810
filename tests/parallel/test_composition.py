"""Does every legal layout train exactly like one device, whatever axes it combines?

Three suites. All legal layouts of a toy on 4 and 8 ranks, in fp64: degrees x ZeRO stage x schedule. A cover of what
else may be combined: every pair of settings of every two knobs occurs in at least one run. And a fixed sample of both,
which always runs. Each compares losses, norms, every gradient and every weight with a plain loop that shares none of
the engine.
"""

from functools import cache

import pytest

from tests.harness.layouts import legal_layouts
from tests.harness.tolerances import GRADIENT, WEIGHT, assert_losses_equal, assert_tensors_equal
from tests.harness.toy import toy_run
from tests.harness.training import Trained, train_on_all_ranks, train_on_one_device
from triax.spec.check import check
from triax.spec.layout import AXES, Layout
from triax.spec.model import ModelSpec
from triax.spec.run import Run

SEQUENCES, MICROBATCHES = 24, 3
MOST_STAGES = 16


def toy_of(num_stages: int, tp: int) -> Run:
    """Return a run whose sizes divide by nothing, with a layer more than stages; heads are grouped where tp lets them.

    A step has three microbatches, so that no sum over them is exact by luck.
    """
    model = ModelSpec(
        hidden_size=12, intermediate_size=23, num_hidden_layers=max(num_stages, 2) + 1, num_attention_heads=8,
        num_key_value_heads=max(4, tp), head_dim=2, vocab_size=61, tie_word_embeddings=num_stages % 2 == 0,
    )  # fmt: skip
    return toy_run(model, train={"sequences_per_step": SEQUENCES}, data={"seq_len": 8})


@cache
def one_device(run: Run, steps: int) -> Trained:
    return train_on_one_device(run, steps)


def assert_equals_one_device(run: Run, layout: Layout, precision: str = "fp64", steps: int = 2) -> None:
    assert check(layout, run) == []
    trained, expected = train_on_all_ranks(run, layout, steps), one_device(run, steps)
    assert_losses_equal(trained.losses, expected.losses, precision)
    assert_losses_equal(trained.grad_norms, expected.grad_norms, precision)
    assert_tensors_equal(trained.first_gradients, expected.first_gradients, GRADIENT[precision])
    assert_tensors_equal(trained.weights, expected.weights, WEIGHT[precision, run.optimizer.name])


def every_layout(ranks: int) -> list[Layout]:
    deepest = toy_of(MOST_STAGES, tp=8)
    return list(legal_layouts(deepest, ranks, MICROBATCHES))


def name_of(layout: Layout) -> str:
    """Return the degrees, the ZeRO stage and the schedule, whether or not they matter."""
    degrees = " ".join(f"{axis}={layout.degree(axis)}" for axis in AXES if layout.degree(axis) > 1)
    schedule = f" {layout.schedule}" if layout.pp > 1 else ""
    return f"{layout.world_size} ranks {degrees} zero={layout.zero}{schedule}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", [*every_layout(4), *every_layout(8)], ids=name_of)
def test_every_layout_equals_one_device(layout: Layout) -> None:
    run = toy_of(layout.pp * layout.stages_per_rank, layout.tp)
    assert_equals_one_device(run, layout)
