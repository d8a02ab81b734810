"""Is a layout that is said in part completed, or refused with what would complete it?"""

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.spec.run_files import Said, make_run
from triax.errors import BadInput
from triax.spec.check import check
from triax.spec.cluster import Cluster
from triax.spec.layout import AXES, Layout
from triax.spec.resolve import resolve_layout
from triax.spec.schedule import SCHEDULES, splits_backward

SMALL = st.integers(1, 6)
REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(AXES, SMALL),
        "zero": st.integers(0, 3),
        "schedule": st.sampled_from(["1F1B", "GPipe"]),
        "stage_cuts": st.lists(SMALL, max_size=3),
        "sequences_per_microbatch": SMALL,
        "microbatches": SMALL,
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "order": st.permutations(AXES),
    },
)


def test_data_parallel_takes_every_rank() -> None:
    layout = resolve_layout(make_run(), 8)
    assert layout == Layout(dp_shard=8, zero=3, sequences_per_microbatch=2)
    assert resolve_layout(make_run(layout={"zero": 0}), 8).dp_replicate == 8


def test_it_takes_what_the_given_axes_leave() -> None:
    layout = resolve_layout(make_run(layout={"pp": 2, "tp": 2, "dp_replicate": 2}), 16)
    assert (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp) == (2, 2, 2, 2)


def test_given_degrees_stay_although_ranks_are_left() -> None:
    layout = resolve_layout(make_run(layout={"dp_shard": 4}), 16)
    assert layout.world_size == 4
    assert [refusal.key for refusal in check(layout, make_run(), Cluster(cards_per_server=16))] == ["world_size"]


@given(REQUESTS, st.integers(1, 48), st.integers(1, 64), st.integers(2, 9000), st.data())
def test_what_is_given_is_kept_and_what_is_open_is_legal(
    request: Said, ranks: int, sequences: int, seq_len: int, data: st.DataObject
) -> None:
    run = make_run(train={"sequences_per_step": sequences}, data={"seq_len": seq_len}, layout=request)
    try:
        layout = resolve_layout(run, ranks)
    except BadInput as refusal:
        first_line = str(refusal).split("\n")[0]
        offered = [int(number) for number in re.findall(r"\d+", first_line.partition("start ")[2])]
        ranks = data.draw(st.sampled_from(offered))
        layout = resolve_layout(run, ranks)
    for key, value in run.layout.model_dump(exclude_none=True).items():
        assert getattr(layout, key) == value
    rest = "dp_replicate" if layout.zero == 0 else "dp_shard"
    assert layout.world_size == ranks or rest in request
    if sequences % layout.data_ranks == 0 and not {"microbatches", "sequences_per_microbatch"} & request.keys():
        assert layout.sequences_per_step == sequences
        assert layout.sequences_per_microbatch <= max(8192 * layout.cp // seq_len, 1)


def test_a_pipeline_gets_microbatches_to_fill_it() -> None:
    """Four for each pipeline rank, where the step is large enough."""
    deep = make_run(train={"sequences_per_step": 64}, layout={"pp": 4, "dp_shard": 1})
    assert resolve_layout(deep, 4).microbatches == 16
    assert resolve_layout(make_run(train={"sequences_per_step": 64}), 1).microbatches == 1
    assert resolve_layout(make_run(train={"sequences_per_step": 6}, layout={"pp": 2}), 4).microbatches == 3
    given = make_run(train={"sequences_per_step": 64}, layout={"pp": 4, "sequences_per_microbatch": 32})
    assert resolve_layout(given, 4).microbatches == 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_is_named_alone_is_legal(name: str) -> None:
    """Stages for each rank and the ZeRO stage are those it can have."""
    run = make_run(layout={"pp": 2, "tp": 2, "schedule": name}, model={"num_hidden_layers": 4})
    for ranks in (4, 8):
        layout = resolve_layout(run, ranks)
        assert layout.stages_per_rank == SCHEDULES[name].min_stages_per_rank
        assert layout.zero == (2 if splits_backward(name) else 3)
        assert check(layout, run, Cluster(cards_per_server=ranks)) == []


def test_too_few_ranks_are_told_how_many_there_must_be() -> None:
    run = make_run(layout={"tp": 4, "pp": 2})
    with pytest.raises(BadInput) as refusal:
        resolve_layout(run, 6)
    assert str(refusal.value) == (
        "pp=2 tp=4 takes ranks in groups of 8, and 6 ranks are no multiple of that: start 8 ranks."
    )
    with pytest.raises(BadInput, match="start 8 or 16 ranks"):
        resolve_layout(run, 12)


def test_a_wrong_number_of_ranks_is_told_with_everything_else_that_is_wrong() -> None:
    run = make_run(layout={"tp": 3, "pp": 2, "schedule": "ZBVZeroBubble", "zero": 3}, train={"sequences_per_step": 7})
    with pytest.raises(BadInput) as refusal:
        resolve_layout(run, 8)
    assert str(refusal.value).split("\n") == [
        "pp=2 tp=3 takes ranks in groups of 6, and 8 ranks are no multiple of that: start 6 or 12 ranks.",
        "tp=3 does not divide num_attention_heads=4 and num_key_value_heads=4: use tp=1, 2 or 4.",
        "pp=2 x stages_per_rank=2 makes 4 stages of 2 layers: use schedule=1F1B stages_per_rank=1.",
        "zero=3 lets go of weights after each forward, and schedule=ZBVZeroBubble needs them once for each of the two "
        "parts of a backward: use zero=1 or zero=2, or schedule=1F1B stages_per_rank=1.",
    ]


def test_microbatches_fill_a_matmul_and_no_more() -> None:
    run = make_run(train={"sequences_per_step": 96}, data={"seq_len": 1024})
    layout = resolve_layout(run, 1)
    assert (layout.sequences_per_microbatch, layout.microbatches) == (8, 12)
    layout = resolve_layout(make_run(train={"sequences_per_step": 96}, layout={"microbatches": 4}), 2)
    assert (layout.sequences_per_microbatch, layout.microbatches) == (12, 4)


def test_an_impossible_number_of_ranks_is_bad_input() -> None:
    for ranks in (-1, 0):
        with pytest.raises(BadInput, match="start 1 or more"):
            resolve_layout(make_run(), ranks)
    with pytest.raises(BadInput, match="on 1000000000 ranks: dp_shard = 1000000000 cannot be: use 1048576 or less"):
        resolve_layout(make_run(), 10**9)


@given(REQUESTS.map(lambda request: request | {"tp": 2**20}), st.integers(-5, 2**70))
def test_any_number_of_ranks_is_a_layout_or_bad_input(request: Said, ranks: int) -> None:
    with contextlib.suppress(BadInput):
        resolve_layout(make_run(layout=request), ranks)
