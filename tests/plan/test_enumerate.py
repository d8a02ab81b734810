"""Are all legal layouts enumerated, and none that would be refused?"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.experts import with_experts
from tests.plan.cases import TOY, case_of, run_of, toy_case
from triax.plan.candidates import CP_METHODS, ORDERS, SCHEDULE_NAMES, Candidates
from triax.plan.enumerate import Fixed, all_layouts, count_layouts, shapes, variants
from triax.plan.legal import legal_mask
from triax.spec.check import check
from triax.spec.cluster import Cluster
from triax.spec.layout import Layout
from triax.spec.model import ModelSpec

MODELS = [
    TOY,
    TOY.model_copy(update={"qk_norm": "full"}),
    TOY.model_copy(update={"num_hidden_layers": 9, "vocab_size": 5, "intermediate_size": 10}),
    TOY.model_copy(update={"num_key_value_heads": 1}),
    TOY.model_copy(update={"sliding_window": 8}),
    with_experts(TOY, num_experts=12),
    with_experts(TOY, num_experts=8, shared_expert_intermediate_size=10, first_k_dense_replace=2),
]
LENGTHS = st.sampled_from([24, 60, 64])
DEGREES = st.sampled_from([1, 2, 3, 4, 8])
LAYOUTS = st.builds(
    Layout,
    pp=DEGREES,
    dp_replicate=DEGREES,
    dp_shard=DEGREES,
    cp=DEGREES,
    cp_method=st.sampled_from(CP_METHODS),
    tp=DEGREES,
    ep=st.sampled_from([1, 1, 2, 3, 4, 8]),
    zero=st.integers(0, 3),
    schedule=st.sampled_from(SCHEDULE_NAMES),
    stages_per_rank=st.sampled_from([1, 2, 3]),
    sequences_per_microbatch=DEGREES,
    microbatches=DEGREES,
    recompute=st.sampled_from(["none", "selective", "full"]),
    order=st.sampled_from(ORDERS),
)


@given(LAYOUTS, st.sampled_from(MODELS), st.sampled_from([4, 8, 12, 96]), LENGTHS, st.booleans())
@settings(max_examples=500)
def test_the_mask_is_check(layout: Layout, model: ModelSpec, sequences: int, seq_len: int, is_sized: bool) -> None:
    """On a cluster of the right size, and with the right step, half of the time: else almost all would be refused."""
    cards = layout.world_size if is_sized else 8
    sequences = layout.sequences_per_step if is_sized else sequences
    case = toy_case(f"{cards}x1xh100", sequences, seq_len, model=model)
    refusals = check(layout, run_of(model, sequences, seq_len), Cluster(servers=cards, device="h100"))
    assert legal_mask(case, Candidates.from_layouts([layout]))[0] == (not refusals)


@pytest.mark.parametrize(("cards", "sequences"), [(1, 4), (4, 8), (6, 12), (16, 32), (48, 96)])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_enumerated_passes_check(model: ModelSpec, cards: int, sequences: int) -> None:
    case = toy_case(f"{cards}x1xh100", sequences, model=model)
    found = all_layouts(case)
    run, cluster = run_of(model, sequences, 64), Cluster(servers=cards, device="h100")
    assert len(found)
    for index in range(0, len(found), max(len(found) // 150, 1)):
        assert check(found.layout(index), run, cluster) == []


@pytest.mark.parametrize(("cards", "sequences"), [(1, 4), (4, 8), (12, 24)])
def test_none_is_enumerated_twice_and_the_count_is_right(cards: int, sequences: int) -> None:
    case = toy_case(f"{cards}x1xh100", sequences)
    shaped = shapes(case)
    found = variants(case, shaped)
    layouts = {found.layout(index) for index in range(len(found))}
    assert len(layouts) == len(found) == count_layouts(case, shaped)


@pytest.mark.parametrize("model", [TOY, with_experts(TOY, num_experts=8)], ids=["dense", "experts"])
def test_nothing_plain_is_missing(model: ModelSpec) -> None:
    """Every legal layout of four ranks with plain schedules and the default order is there."""
    case = toy_case("1x4xh100", 8, model=model)
    case = replace(case, engine=replace(case.engine, unpriced=()))
    found = all_layouts(case)
    there = {found.layout(index) for index in range(len(found))}
    run = run_of(model, 8, 64)
    asked = [
        Layout(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=ep, zero=zero, schedule=schedule,
               recompute=recompute, stages_per_rank=stages, sequences_per_microbatch=size,
               microbatches=8 // (replicate * shard) // size)
        for pp in (1, 2, 4) for tp in (1, 2, 4) for cp in (1, 2, 4) for ep in (1, 2, 4)
        for replicate in (1, 2, 4) for shard in (1, 2, 4)
        for zero in (0, 1, 2, 3) for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
        for stages in (1, 2) for recompute in ("none", "full") for size in (1, 2, 4)
        if pp * replicate * shard * cp * tp == 4 and 8 // (replicate * shard) // size
        and ((zero > 0) == (shard > 1) or (cp > 1 and shard == 1))
    ]  # fmt: skip
    legal = [layout for layout in asked if not check(layout, run, Cluster(cards_per_server=4, device="h100"))]
    assert len(legal) > 100
    # Fewer stages than a schedule's bubble is worth, and steps cut finer than small divisors, are the only ones absent.
    assert [layout for layout in legal if layout not in there] == []


def test_axes_without_a_price_are_tried_where_they_are_decided() -> None:
    case = toy_case("1x4xh100", 8, model=with_experts(TOY, num_experts=8))
    found = all_layouts(case)
    assert set(found.cp) == set(found.ep) == {1}
    found = all_layouts(case, Fixed({"cp": 2, "ep": 4, "cp_method": CP_METHODS.index("ring")}))
    assert (set(found.cp), set(found.ep), set(found.zero)) == ({2}, {4}, {0, 1, 2, 3})
    assert found.layout(0).cp_method == "ring"


def test_decided_columns_are_kept() -> None:
    case = toy_case("2x8xh100", 32)
    fixed = Fixed({"tp": 2, "zero": 3, "recompute": 0, "sequences_per_microbatch": 2})
    found = all_layouts(case, fixed)
    assert len(found)
    assert set(found.tp) == {2}
    assert set(found.zero[found.dp_shard > 1]) == {3}
    assert set(found.sequences_per_microbatch) == {2}
    assert not len(all_layouts(case, Fixed({"tp": 3})))


@pytest.mark.parametrize(
    ("columns", "is_possible"), [({"dp_shard": 1}, True), ({"dp_shard": 2}, True), ({"dp_shard": 3}, False)]
)
def test_the_smallest_variant_of_a_shape_keeps_decisions_too(columns: dict[str, int], is_possible: bool) -> None:
    """Else a shape would be said to fit that does not in what was decided."""
    case = toy_case("1x8xh100", 16)
    shaped = shapes(case, Fixed(columns))
    assert bool(len(shaped)) == is_possible
    assert set(shaped.dp_shard) <= {columns["dp_shard"]}
    assert bool(len(all_layouts(case, Fixed(columns)))) == is_possible


def test_engines_have_their_own_axes() -> None:
    assert set(all_layouts(case_of("llama-3.1-8b", "2x8xh100", 32, engine_name="fsdp1")).tp) == {1}
    megatron = all_layouts(case_of("mixtral-8x7b", "2x8xh100", 32, engine_name="megatron"))
    assert set(megatron.zero) == {0, 1}
    assert set(megatron.ep) == {1, 2, 4, 8}
    assert max(megatron.cp) > 1
    assert np.all(megatron.dp_shard * megatron.cp * megatron.tp % megatron.ep == 0)
