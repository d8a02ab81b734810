"""Does the waterfall of a step add up, and move the way physics says?"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.cases import case_of
from triax.plan.candidates import FULL, SELECTIVE, Candidates, Integers
from triax.plan.case import Case
from triax.plan.engine import engine
from triax.plan.parts import parts
from triax.plan.step import FACTOR_NAMES, WATERFALL, Factors, StepTime, combine
from triax.plan.workload import Recipe, precision

LLAMA = case_of("llama-3.1-70b", "16x8xh100", 512, engine_name="megatron")
MOE = case_of("mixtral-8x22b", "16x8xh100", 512, engine_name="megatron")


def time_of(case: Case, **columns: object) -> StepTime:
    """Uncalibrated: what the formulas say."""
    made = parts(case.network, case.workload, case.machine, case.engine, Candidates.of(**columns))
    return combine(made, Factors.ones(len(made)))


def layouts() -> dict[str, Integers]:
    """All of tp x pp x zero on 128 cards that keep 512 sequences whole."""
    tp, pp, zero = (grid.reshape(-1) for grid in np.meshgrid([1, 2, 4, 8], [1, 2, 4, 8], [1, 2, 3]))
    shard = 128 // (tp * pp)
    return {"tp": tp, "pp": pp, "zero": zero, "dp_shard": shard, "microbatches": 512 // shard}


def test_the_terms_add_up_and_none_is_negative() -> None:
    for case in (LLAMA, MOE):
        time = time_of(case, **layouts())
        terms = np.stack([getattr(time, name) for name in WATERFALL])
        assert time.step_s == pytest.approx(terms.sum(axis=0))
        assert terms.min() >= 0


def test_a_million_at_once_say_what_each_says_alone() -> None:
    columns = layouts()
    together = time_of(LLAMA, **columns).step_s
    alone = [time_of(LLAMA, **{name: values[i] for name, values in columns.items()}).step_s[0] for i in range(48)]
    assert together == pytest.approx(alone, rel=1e-12)


def test_no_step_is_faster_than_its_operations_at_the_peak() -> None:
    floor = LLAMA.flops_per_step / (128 * LLAMA.machine.card.peak("bf16"))
    assert time_of(LLAMA, **layouts()).step_s.min() > floor


def test_a_degree_of_one_costs_nothing() -> None:
    time = time_of(LLAMA, dp_shard=128, zero=3, microbatches=4)
    assert (time.tp[0], time.cp[0], time.ep[0], time.bubble[0], time.pp[0]) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("recompute", [SELECTIVE, FULL])
def test_recomputing_costs_time(recompute: int) -> None:
    plain, again = time_of(LLAMA, tp=8, dp_shard=16, microbatches=32, recompute=[0, recompute]).step_s
    assert plain < again < 1.5 * plain


def test_full_recompute_costs_about_a_third() -> None:
    """One forward more beside forward and two of backward (arXiv:2205.05198, section 5)."""
    plain, again = time_of(LLAMA, dp_shard=128, zero=3, microbatches=4, recompute=[0, FULL]).compute
    assert again / plain == pytest.approx(4 / 3, abs=0.04)


def test_tensor_parallel_across_servers_is_ruinous() -> None:
    inside, across = time_of(LLAMA, tp=[8, 32], dp_shard=[16, 4], microbatches=[32, 128]).tp
    assert across > 4 * inside


def test_more_microbatches_shrink_the_bubble() -> None:
    time = time_of(
        LLAMA, pp=8, tp=8, dp_shard=2, sequences_per_microbatch=[8, 4, 2, 1], microbatches=[32, 64, 128, 256]
    )
    part = time.bubble / time.step_s
    assert (np.diff(part) < 0).all()


def test_interleaving_divides_the_bubble() -> None:
    plain, four = time_of(
        LLAMA, pp=4, tp=8, dp_shard=4, microbatches=128, schedule=[1, 2], stages_per_rank=[1, 5]
    ).bubble
    assert plain / four == pytest.approx(5, rel=0.15)


def test_zero_3_moves_more_than_zero_1() -> None:
    one, three = time_of(LLAMA, tp=8, dp_shard=16, microbatches=32, zero=[1, 3]).dp
    assert three > one


def test_a_slower_network_never_makes_a_step_faster() -> None:
    slow = replace(LLAMA, machine=replace(LLAMA.machine, server_bytes_per_s=LLAMA.machine.server_bytes_per_s / 10))
    assert (time_of(slow, **layouts()).step_s >= time_of(LLAMA, **layouts()).step_s).all()


def test_experts_meet_over_their_axis_only() -> None:
    time = time_of(MOE, dp_shard=128, microbatches=4, ep=[1, 8])
    assert time.ep[0] == 0 < time.ep[1]


@settings(max_examples=25)
@given(st.sampled_from(FACTOR_NAMES), st.floats(1.01, 3.0))
def test_every_factor_slows_and_none_hurries(name: str, factor: float) -> None:
    made = parts(MOE.network, MOE.workload, MOE.machine, MOE.engine, Candidates.of(**layouts(), ep=2))
    ones = Factors.ones(len(made))
    slower = combine(made, replace(ones, **{name: factor * np.ones(len(made))}))
    # Work that takes longer hides more of what runs beside it, so that a step may stay as it is.
    assert (slower.step_s >= combine(made, ones).step_s * (1 - 2e-3)).all()


def test_the_card_waits_while_the_host_reads_counts_of_tokens() -> None:
    """A third of the launches, in the forward, and once more where it is computed again; in graphs there are none."""
    free, graphs = (
        replace(MOE, engine=replace(MOE.engine, **change))
        for change in ({"waits_for_counts": False}, {"has_cuda_graphs": True})
    )
    layout = {"dp_shard": 128, "microbatches": 4, "ep": 8, "recompute": [0, FULL]}
    waits, runs_on, graph = (time_of(case, **layout).host for case in (MOE, free, graphs))
    assert (waits > runs_on).all()
    assert (runs_on > graph).all()
    assert (graph == 0).all()
    assert waits[1] - runs_on[1] > 1.5 * (waits[0] - runs_on[0])


def test_products_hide_exchanges_but_for_one_of_their_parts() -> None:
    beside = replace(LLAMA, engine=replace(LLAMA.engine, hides_tp=0.8))
    columns = {"tp": [2, 8], "dp_shard": [64, 16], "microbatches": [8, 32]}
    plain, hidden = time_of(LLAMA, **columns).tp, time_of(beside, **columns).tp
    assert hidden == pytest.approx(plain / np.array([2, 8]))
    slow = replace(LLAMA.machine, inside_all_gather=1e9)
    assert (
        time_of(replace(beside, machine=slow), **columns).tp[1]
        > 0.8 * time_of(replace(LLAMA, machine=slow), **columns).tp[1]
    )


@pytest.mark.parametrize(
    ("name", "recipe", "part"),
    [("megatron", "fp8_delayed", 0.75), ("megatron", "nvfp4", 0.64), ("torchtitan", "fp8_tensorwise", 0.75),
     ("torchtitan", "fp8_rowwise", 1.0), ("megatron", "bf16", 1.0)],
)  # fmt: skip
def test_half_of_the_exchanges_are_of_quantised_numbers_where_the_engine_sends_those(
    name: str, recipe: Recipe, part: float
) -> None:
    case = replace(LLAMA, engine=engine(name))
    narrow = replace(case, workload=replace(case.workload, precision=precision(recipe)))
    layout = {"tp": 8, "dp_shard": 16, "microbatches": 32}
    assert time_of(narrow, **layout).tp[0] / time_of(case, **layout).tp[0] == pytest.approx(part, abs=0.03)


def test_uneven_cuts_are_those_of_the_longest_rank() -> None:
    even, uneven = (
        time_of(LLAMA, pp=2, tp=8, dp_shard=8, microbatches=64, cut=0, cuts=(cuts,)).step_s[0]
        for cuts in ((41, 39), (60, 20))
    )
    assert uneven / even == pytest.approx(60 / 41, rel=0.1)
