"""Is a shrunk run legal, small, and of the same kind as the run it stands for?"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.spec.run_files import make_run
from triax.spec.check import check
from triax.spec.layout import AXES, Layout
from triax.spec.legal_values import divisors
from triax.spec.model import ModelSpec
from triax.spec.run import Run
from triax.spec.schedule import SCHEDULES, schedule_kind
from triax.verify.shrink import MOST_RANKS, small_cases, whole_cases

LLAMA_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def run_of(layout: Layout, model: dict[str, Any], seq_len: int = 4096) -> Run:
    return make_run(
        model=model, data={"seq_len": seq_len}, train={"sequences_per_step": layout.sequences_per_step},
        eval={"every_steps": 10, "sequences": 8}, learning_rate={"schedule": "wsd", "warmup_steps": 5},
    )  # fmt: skip


@st.composite
def experts(draw: Any, layers: int) -> dict[str, Any]:
    """As many as every degree of ``runs`` divides, or a model that has groups of them."""
    groups = draw(st.sampled_from([1, 2, 3, 4, 8]))
    return {
        "num_experts": 96, "num_experts_per_tok": draw(st.integers(1, 8)), "n_group": groups,
        "topk_group": draw(st.integers(1, groups)), "moe_intermediate_size": draw(st.integers(8, 3000)),
        "shared_expert_intermediate_size": draw(st.sampled_from([0, 64, 700])),
        "first_k_dense_replace": draw(st.integers(0, layers - 1)),
        "selection_bias": draw(st.booleans()),
    }  # fmt: skip


@st.composite
def runs(draw: Any) -> tuple[Run, Layout]:
    """Legal runs: sizes are multiples of what the layout cuts them by, or not, where they need not be."""
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    kind = schedule_kind(schedule)
    pp = draw(st.integers(kind.min_pp, 6))
    stages_per_rank = draw(st.integers(kind.min_stages_per_rank, kind.max_stages_per_rank or 3))
    stages = pp * stages_per_rank
    layers = stages + draw(st.integers(0, 2 * stages))
    cuts = None
    if draw(st.booleans()):
        cuts = [1] * stages
        for _ in range(layers - stages):
            cuts[draw(st.integers(0, stages - 1))] += 1
    tp = draw(st.sampled_from([1, 2, 3, 4, 8]))
    zero = draw(st.integers(0, 2))
    sharing = draw(st.sampled_from([1, 3, 4])) if zero else 1
    cp = draw(st.sampled_from([1, 1, 2, 4]))
    method = draw(st.sampled_from(["all_gather", "ring", "all_to_all"]))
    heads = tp * draw(st.integers(1, 3)) * (cp if method == "all_to_all" else 1)
    groups = draw(st.integers(1, 5))
    width = 2 * draw(st.integers(4, 20))
    window = draw(st.none() | st.integers(1, 3000)) if cp == 1 or method != "ring" else None
    model: dict[str, Any] = {
        "hidden_size": draw(st.integers(20, 3000)), "intermediate_size": draw(st.integers(64, 9000)),
        "num_hidden_layers": layers, "num_key_value_heads": heads, "num_attention_heads": heads * groups,
        "head_dim": width, "vocab_size": draw(st.integers(64, 50000)), "tie_word_embeddings": draw(st.booleans()),
        "sliding_window": window, "qk_norm": draw(st.sampled_from(["none", "head"])),
        "global_layers": draw(st.lists(st.integers(0, layers - 1), max_size=3)),
        "layers_without_rope": draw(st.lists(st.integers(0, layers - 1), max_size=3)),
        "partial_rotary_factor": draw(st.sampled_from([1.0, 0.5])) if width % 4 == 0 else 1.0,
        "experts": draw(st.none() | experts(layers)),
        "rope_scaling": draw(st.sampled_from([
            None, {"kind": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            {"kind": "yarn", "factor": 4.0}, {"kind": "dynamic", "factor": 2.0},
        ])),
    }  # fmt: skip
    layout = Layout.model_validate(
        {
            "pp": pp, "stages_per_rank": stages_per_rank, "schedule": schedule, "stage_cuts": cuts, "tp": tp,
            "dp_replicate": draw(st.sampled_from([1, 2, 5])), "dp_shard": sharing,
            "cp": cp, "cp_method": method, "zero": zero, "microbatches": draw(st.integers(1, 40)),
            "ep": draw(st.sampled_from(divisors(sharing * cp * tp))) if model["experts"] else 1,
            "sequences_per_microbatch": draw(st.integers(1, 4)), "order": draw(st.permutations(AXES)),
            "recompute": draw(st.sampled_from(["none", "full"])),
        }
    )  # fmt: skip
    return run_of(layout, model, seq_len=24 * cp * draw(st.integers(1, 50))), layout


@given(runs())
def test_a_shrunk_run_is_legal_and_of_the_same_kind(given_run: tuple[Run, Layout]) -> None:
    run, layout = given_run
    assert check(layout, run) == []
    for case in small_cases(run, layout, "fp64", 3):
        small, model = case.layout, case.run.model
        assert check(small, case.run) == []
        assert small.world_size <= MOST_RANKS
        assert case.run.data.seq_len <= 32
        assert model.num_hidden_layers <= 8
        assert model.hidden_size <= 100_000 // 8
        assert model.num_attention_heads // model.kv_heads == run.model.num_attention_heads // run.model.kv_heads
        kept = (
            "tie_word_embeddings",
            "qk_norm",
            "hidden_act",
            "norm_placement",
            "rms_norm_eps",
            "partial_rotary_factor",
        )
        assert [getattr(model, key) for key in kept] == [getattr(run.model, key) for key in kept]
        assert {model.reach(layer) for layer in range(model.num_hidden_layers)} <= {
            run.model.reach(layer) for layer in range(run.model.num_hidden_layers)
        }
        assert_experts_of_the_same_kind(run.model, model)
        assert (small.ep > 1) <= (layout.ep > 1)
        if small.expert_ranks > 1:
            assert (small.ep > 1) == (layout.ep > 1)
        if small.pp > 1:
            assert (small.schedule, small.zero, small.recompute) == (layout.schedule, layout.zero, layout.recompute)


def assert_experts_of_the_same_kind(whole: ModelSpec, small: ModelSpec) -> None:
    assert (small.experts is None) == (whole.experts is None)
    if small.experts is None or whole.experts is None:
        return
    assert small.sparse_layers
    has_dense = [len(model.sparse_layers) < model.num_hidden_layers for model in (small, whole)]
    assert has_dense[0] == has_dense[1]
    one, other = small.experts, whole.experts
    assert (one.n_group > 1, one.topk_group < one.n_group) == (other.n_group > 1, other.topk_group < other.n_group)
    assert (one.moe_intermediate_size % 8 == 0) == (other.moe_intermediate_size % 8 == 0)
    assert (one.shared_expert_intermediate_size > 0) == (other.shared_expert_intermediate_size > 0)
    assert one.selection_bias == other.selection_bias
    assert one.num_experts == 8


def test_three_axes_are_one_case_and_four_are_each_three_of_them() -> None:
    three = Layout(pp=4, dp_shard=8, tp=4, microbatches=16, zero=3)
    (case,) = small_cases(run_of(three, LLAMA_70B), three, "fp64", 3)
    assert [case.layout.degree(axis) for axis in AXES] == [2, 1, 2, 1, 2]
    four = three.model_copy(update={"dp_replicate": 2})
    cut = [
        {axis for axis in AXES if case.layout.degree(axis) > 1}
        for case in small_cases(run_of(four, LLAMA_70B), four, "fp64", 3)
    ]
    every = {"pp", "dp_replicate", "dp_shard", "tp"}
    assert sorted(map(sorted, cut)) == sorted(sorted(every - {left_out}) for left_out in every)


@pytest.mark.parametrize(
    ("model", "layout", "kept"),
    [
        ({"vocab_size": 50257}, {"tp": 2}, lambda small: small.vocab_size % 2 == 1),
        ({"vocab_size": 128256}, {"tp": 8}, lambda small: small.vocab_size % 2 == 0),
        ({"vocab_size": 128258}, {"tp": 2, "dp_shard": 2}, lambda small: small.vocab_size % 4 == 2),
        ({"vocab_size": 128258}, {"tp": 4}, lambda small: small.vocab_size % 2 == 1),
        ({"intermediate_size": 11009}, {"tp": 4}, lambda small: small.intermediate_size % 2 == 1),
        ({"num_hidden_layers": 79}, {"pp": 4}, lambda small: small.num_hidden_layers == 3),
        ({"num_hidden_layers": 80}, {"pp": 4}, lambda small: small.num_hidden_layers == 2),
        ({"num_key_value_heads": None, "num_attention_heads": 64}, {}, lambda small: small.num_key_value_heads is None),
        ({"num_key_value_heads": 1}, {}, lambda small: (small.kv_heads, small.num_attention_heads) == (1, 64)),
        ({"sliding_window": 1024, "global_layers": [5, 11]}, {},
         lambda small: small.sliding_window == 8 and {small.reach(0), small.reach(1)} == {"local", "global"}),
        ({"sliding_window": 8192}, {}, lambda small: small.sliding_window >= 32),
        ({"layers_without_rope": [3]}, {"pp": 2}, lambda small: len(small.layers_without_rope) == 1),
        ({"head_dim": 100}, {}, lambda small: small.hidden_size != small.num_attention_heads * small.head_width),
        ({"partial_rotary_factor": 0.25}, {}, lambda small: small.rotary_width == 2),
        ({"rope_scaling": {"kind": "longrope", "factor": 4.0, "short_factor": [1.0] * 64, "long_factor": [2.0] * 64,
                           "original_max_position_embeddings": 2048}}, {},
         lambda small: small.unstretched_length == 16 and len(small.rope_scaling.long_factor) == 4),
    ],
)  # fmt: skip
def test_what_decides_which_code_runs_is_kept(model: dict[str, Any], layout: dict[str, Any], kept: Any) -> None:
    asked = Layout(microbatches=16, zero=2, **layout)
    (case,) = small_cases(run_of(asked, LLAMA_70B | model), asked, "fp64", 3)
    assert kept(case.run.model), case.run.model


def test_uneven_stages_stay_uneven() -> None:
    layout = Layout(pp=4, stage_cuts=(18, 20, 21, 21), microbatches=8)
    (case,) = small_cases(run_of(layout, LLAMA_70B), layout, "fp64", 3)
    assert (case.layout.stage_cuts, case.run.model.num_hidden_layers) == ((1, 2), 3)


def test_the_whole_model_keeps_its_degrees_where_ranks_suffice() -> None:
    layout = Layout(pp=4, tp=2, microbatches=8)
    run = run_of(layout, LLAMA_70B)
    (case,) = whole_cases(run, layout, "fp32", 2)
    assert (case.layout, case.run.model) == (layout, run.model)
    assert case.run.train.steps == 2
    assert case.run.precision.compute == case.run.precision.master == "fp32"
    wide = Layout(pp=4, tp=8, microbatches=8)
    (case,) = whole_cases(run_of(wide, LLAMA_70B), wide, "fp32", 2)
    assert (case.layout.pp, case.layout.tp, case.run.model) == (2, 2, ModelSpec.model_validate(LLAMA_70B))
