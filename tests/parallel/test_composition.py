"""Does every legal layout train exactly like one device, whatever axes it combines?

All legal layouts of a toy on 4 and 8 ranks, in fp64: degrees x ZeRO stage x schedule. A fixed, varied sample of them
always runs. Each compares losses, norms, every gradient and every weight with a plain loop that shares none of the
engine; what else may be combined is in test_cover.py.
"""

from functools import cache

import pytest

from tests.harness.layouts import legal_layouts
from tests.harness.toy import toy_run
from tests.parallel.equality import assert_equals_one_device
from triax.spec.layout import AXES, Layout
from triax.spec.model import ModelSpec
from triax.spec.run import Run

MICROBATCHES = 3
"""No power of two, so that no sum over them is exact by luck."""
MOST_STAGES = 16

ALWAYS = (
    "4 ranks dp_shard=2 tp=2 zero=3",
    "4 ranks dp_replicate=2 tp=2 zero=0",
    "4 ranks pp=2 tp=2 zero=3 1F1B",
    "4 ranks pp=2 dp_replicate=2 zero=0 GPipe",
    "4 ranks pp=2 dp_shard=2 zero=3 Interleaved1F1B",
    "4 ranks pp=2 dp_shard=2 zero=1 LoopedBFS",
    "4 ranks pp=2 dp_shard=2 zero=2 ZBVZeroBubble",
    "4 ranks pp=2 tp=2 zero=2 DualPipeV",
    "4 ranks pp=4 zero=2 InterleavedZeroBubble",
    "8 ranks pp=2 dp_shard=2 tp=2 zero=3 1F1B",
)
"""Each axis with each other one, each stage, each schedule."""


@cache
def toy_of(num_stages: int, tp: int) -> Run:
    """Return a run whose sizes divide by nothing and with a layer more than stages. Heads are grouped where tp lets
    them; embeddings are tied for some numbers of stages and not for others."""
    model = ModelSpec(
        hidden_size=12, intermediate_size=23, num_hidden_layers=max(num_stages, 2) + 1, num_attention_heads=8,
        num_key_value_heads=max(4, tp), head_dim=2, vocab_size=61, tie_word_embeddings=num_stages in (1, 4, 16),
    )  # fmt: skip
    return toy_run(model, train={"sequences_per_step": 8 * MICROBATCHES}, data={"seq_len": 8})


def every_layout(ranks: int) -> list[Layout]:
    return list(legal_layouts(toy_of(MOST_STAGES, tp=8), ranks, MICROBATCHES))


def name_of(layout: Layout) -> str:
    """Return the degrees, the ZeRO stage and the schedule, whether or not they matter."""
    degrees = " ".join(f"{axis}={layout.degree(axis)}" for axis in AXES if layout.degree(axis) > 1)
    schedule = f" {layout.schedule}" if layout.pp > 1 else ""
    return f"{layout.world_size} ranks {degrees} zero={layout.zero}{schedule}"


def marked(layout: Layout) -> object:
    name = name_of(layout)
    return pytest.param(layout, id=name, marks=() if name in ALWAYS else pytest.mark.exhaustive)


@pytest.mark.parametrize("layout", [marked(layout) for ranks in (4, 8) for layout in every_layout(ranks)])
def test_every_layout_equals_one_device(layout: Layout) -> None:
    assert_equals_one_device(toy_of(layout.pp * layout.stages_per_rank, layout.tp), layout)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("zero", [1, 2])
def test_split_backwards_add_up_in_the_reduce_precision(zero: int, microbatches: int) -> None:
    """Their gradients come in two parts, the head's before the others', in bf16 at first and in fp32 when reduced."""
    run = toy_run(
        toy_of(2, tp=1).model,
        train={"sequences_per_step": 4 * microbatches},
        data={"seq_len": 8},
        precision={"compute": "bf16", "master": "fp32", "reduce": "fp32"},
        optimizer={"name": "sgd"},
    )
    layout = Layout(
        pp=2, dp_shard=2, zero=zero, schedule="InterleavedZeroBubble", microbatches=microbatches,
        sequences_per_microbatch=2,
    )  # fmt: skip
    assert_equals_one_device(run, layout)


def test_the_layouts_are_all_there_and_each_once() -> None:
    """Counted by hand. 8 ranks: 6 cuts over the data axes and tp that share, with 3 ZeRO stages, and 4 that do not,
    with 2, make 26 without a pipeline; pp=2 leaves 3 and 3 cuts of 4 ranks, with 4 schedules of whole backwards (3 or 2
    ZeRO stages) and 3 of split ones (2 or 2), 96; pp=4 leaves 1 and 2 of 2 ranks, 46; pp=8 leaves 7 schedules with 2
    stages, 14."""
    for ranks, expected in ((1, 2), (2, 7 + 14), (4, 15 + 46 + 14), (8, 26 + 96 + 46 + 14)):
        names = [name_of(layout) for layout in every_layout(ranks)]
        assert len(names) == len(set(names)) == expected
    assert set(ALWAYS) <= {name_of(layout) for ranks in (4, 8) for layout in every_layout(ranks)}
