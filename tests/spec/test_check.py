"""Is every illegal layout refused with advice that is legal, and every legal one let through?"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.spec.run_files import Said, make_run
from triax.errors import BadInput
from triax.spec.check import check, require_legal
from triax.spec.cluster import Cluster
from triax.spec.layout import AXES, Layout, Refusal
from triax.spec.resolve import resolve_layout
from triax.spec.run import Run
from triax.spec.schedule import SCHEDULES, legal, splits_backward

SMALL = st.integers(1, 4)
LAYOUTS = st.builds(
    Layout,
    **dict.fromkeys((*AXES, "ep", "stages_per_rank", "sequences_per_microbatch", "microbatches"), SMALL),
    zero=st.integers(0, 3),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    stage_cuts=st.none() | st.lists(SMALL, max_size=3),
    cp_method=st.sampled_from(["all_gather", "ring", "all_to_all"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    order=st.permutations(AXES),
)


def run_of(
    sequences: int, *, in_tokens: bool = False, layers: int = 2, seq_len: int = 32, window: int | None = None
) -> Run:
    size: Said = {"sequences_per_step": None, "tokens_per_step": sequences * seq_len} if in_tokens else {
        "sequences_per_step": sequences
    }  # fmt: skip
    return make_run(
        train=size, model={"num_hidden_layers": layers, "sliding_window": window}, data={"seq_len": seq_len}
    )


RUNS = st.builds(
    run_of, st.integers(1, 64), in_tokens=st.booleans(), layers=st.integers(1, 9),
    seq_len=st.sampled_from([2, 12, 24, 30, 32]), window=st.none() | st.integers(1, 40),
)  # fmt: skip
CLUSTERS = st.builds(Cluster, servers=st.integers(1, 4), cards_per_server=st.integers(1, 8))


def alternatives(refusal: Refusal) -> Iterator[Said]:
    """The ways out that a refusal offers, each as the settings it asks for; ``ranks`` is how many to start."""
    advice = refusal.message.removesuffix(".").rpartition(": ")[2]
    if advice.endswith("leave it out"):
        yield {refusal.key: None}
        counts = re.findall(r"\d+", advice)
        yield from [{refusal.key: tuple(map(int, counts))}] if counts else []
        return
    advice, _, degrees = advice.partition("make dp_replicate x dp_shard equal ")
    yield from ({"data_ranks": int(number)} for number in re.findall(r"\d+", degrees))
    for option in re.split(r",? or |, ", advice.removesuffix(", or ")):
        pairs = re.findall(r"([a-z_.]+)=(\w+)", option)
        if pairs:
            yield {key.removeprefix("train."): int(value) if value.isdigit() else value for key, value in pairs}
        elif ranks := re.fullmatch(r"start (\d+) ranks", option):
            yield {"ranks": int(ranks[1])}
        elif number := re.fullmatch(r"(\d+)", option):
            yield {refusal.key: int(number[1])}
        else:
            assert re.fullmatch(r"choose degrees whose product is \d+|", option), f"{option!r} in {refusal.message}"


def data_degrees(data_ranks: int, zero: int) -> Said:
    return {"dp_replicate": data_ranks, "dp_shard": 1} if zero == 0 else {"dp_replicate": 1, "dp_shard": data_ranks}


def heeded(advice: Said, layout: Layout, run: Run, cluster: Cluster) -> tuple[Layout, Run, Cluster]:
    """Return the three with one piece of advice followed and nothing else changed."""
    advice = dict(advice)
    sizes = {key: advice.pop(key) for key in ("sequences_per_step", "tokens_per_step") if key in advice}
    run = run.model_copy(update={"train": run.train.model_copy(update=sizes)})
    if "ranks" in advice:
        cluster = Cluster(cards_per_server=advice.pop("ranks"))
    if "data_ranks" in advice:
        advice |= data_degrees(advice.pop("data_ranks"), layout.zero)
    return Layout.model_validate(layout.model_dump() | advice), run, cluster


def keys(refusals: list[Refusal]) -> list[str]:
    return [refusal.key for refusal in refusals]


@given(LAYOUTS, RUNS, CLUSTERS)
def test_each_way_out_is_one(layout: Layout, run: Run, cluster: Cluster) -> None:
    """Whatever single piece of advice is followed, the reason that gave it is gone, and only sizes may be off anew."""
    refusals = check(layout, run, cluster)
    assert len(set(keys(refusals))) == len(refusals)
    for refusal in refusals:
        ways = list(alternatives(refusal))
        assert ways, refusal.message
        for advice in ways:
            left = check(*heeded(advice, layout, run, cluster))
            assert refusal.key not in keys(left), (refusal.message, advice)
            sizes = {"data_ranks", "microbatches", "world_size"}
            sizes |= {"stage_cuts"} if layout.stage_cuts else set()
            assert set(keys(left)) - set(keys(refusals)) <= sizes, (refusal.message, advice)


@given(LAYOUTS, RUNS, CLUSTERS)
def test_a_layout_says_itself_what_was_asked(layout: Layout, run: Run, cluster: Cluster) -> None:
    for refusal in check(layout, run, cluster):
        assert refusal.message.endswith(".")
        assert "\n" not in refusal.message
        if refusal.key in Layout.model_fields and refusal.key != "stage_cuts":
            assert f"{refusal.key}={getattr(layout, refusal.key)}" in refusal.message


REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys((*AXES, "ep", "stages_per_rank", "sequences_per_microbatch", "microbatches"), SMALL),
        "zero": st.integers(0, 3),
        "schedule": st.sampled_from(sorted(SCHEDULES)),
        "stage_cuts": st.lists(SMALL, max_size=3),
        "recompute": st.sampled_from(["none", "selective", "full"]),
    },
)


def resolved(run: Run, request: Said, ranks: int) -> tuple[Layout, int]:
    """Return the layout of a request, on the number of ranks that its refusal offers where it needs another one."""
    asked = Run.model_validate(run.model_dump() | {"layout": request})
    try:
        return resolve_layout(asked, ranks), ranks
    except BadInput as refusal:
        offered = re.findall(r"start (\d+)", str(refusal))
        return resolve_layout(asked, int(offered[0])), int(offered[0])


@given(REQUESTS, RUNS, st.integers(1, 16), st.data())
def test_who_follows_the_advice_gets_to_train(request: Said, run: Run, ranks: int, data: st.DataObject) -> None:
    """A user who edits the file as told, whichever way out is taken each time, is soon refused no more."""
    for _ in range(8):
        layout, ranks = resolved(run, request, ranks)
        cluster = Cluster(cards_per_server=ranks)
        refusals = check(layout, run, cluster)
        if not refusals:
            return
        for refusal in refusals:
            advice = data.draw(st.sampled_from(list(alternatives(refusal))))
            if "data_ranks" in advice:
                ranks = advice.pop("data_ranks")
                advice |= data_degrees(ranks, layout.zero)
            ranks = advice.pop("ranks", ranks)
            _, run, _ = heeded(advice, layout, run, cluster)
            settings = {key: value for key, value in advice.items() if key in Layout.model_fields}
            request = {key: value for key, value in (request | settings).items() if value is not None}
    pytest.fail(f"still refused: {refusals}")


@st.composite
def fitting_pipelines(draw: st.DrawFn) -> Said:
    """Schedule, pp, stages_per_rank and layers, legal by the schedule's own rules and with a layer for each stage."""
    kind = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    pp, least = draw(st.integers(kind.min_pp, 4)), kind.min_stages_per_rank
    stages_per_rank = draw(st.integers(least, kind.max_stages_per_rank or 3))
    pipeline = {"schedule": kind.name, "pp": pp, "stages_per_rank": stages_per_rank}
    return pipeline | {"layers": draw(st.integers(pp * stages_per_rank, 13))}


@given(
    fitting_pipelines(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.sampled_from([1, 2, 4]), st.data()
)
def test_what_is_trained_is_not_refused(
    pipeline: Said, replicate: int, shard: int, zero: int, tp: int, data: st.DataObject
) -> None:
    """Legal by the schedule's own rules, by the few that others add, and by nothing else."""
    layers, most = pipeline.pop("layers"), 2 if splits_backward(pipeline["schedule"]) else 3
    layout = Layout(
        **pipeline, dp_replicate=replicate, dp_shard=1 if zero == 0 else shard, tp=tp, zero=min(zero, most),
        sequences_per_microbatch=data.draw(SMALL), microbatches=data.draw(SMALL),
        order=data.draw(st.permutations(AXES)),
        recompute=data.draw(st.sampled_from(["none", "full"] if most == 2 else ["none", "selective", "full"])),
    )  # fmt: skip
    run = make_run(train={"sequences_per_step": layout.sequences_per_step}, model={"num_hidden_layers": layers})
    assert check(layout, run, Cluster(cards_per_server=layout.world_size)) == []
    require_legal(layout, run)


@given(st.sampled_from(sorted(SCHEDULES)), SMALL, SMALL, st.integers(1, 3))
def test_schedules_are_judged_by_their_own_rules(name: str, pp: int, stages_per_rank: int, microbatches: int) -> None:
    layout = Layout(schedule=name, pp=pp, stages_per_rank=stages_per_rank, microbatches=microbatches)
    run = make_run(train={"sequences_per_step": microbatches}, model={"num_hidden_layers": 16})
    assert keys(check(layout, run)) == [refusal.key for refusal in legal(name, pp, stages_per_rank, microbatches)]


def messages(run: Run | None = None, cluster: Cluster | None = None, **changes: Any) -> list[str]:
    return [refusal.message for refusal in check(Layout(**changes), run or run_of(1), cluster)]


def of(**model: Any) -> Run:
    """Return a run of one sequence of 32 tokens whose model has 4 heads unless told otherwise."""
    return make_run(train={"sequences_per_step": 1}, model=model)


def test_what_this_version_does_not_train() -> None:
    assert messages(ep=2) == ["ep=2 asks for experts, and this model has none: use ep=1."]


def test_sequences_that_cannot_be_cut() -> None:
    assert messages(cp=16) == []
    assert messages(cp=3) == [
        "cp=3 cuts a sequence into 6 chunks, two for each rank, and seq_len=32 does not divide into them (30 or 36 "
        "would): use cp=1, 2 or 4."
    ]
    assert messages(cp=32) == [
        "cp=32 cuts a sequence into 64 chunks, two for each rank, and seq_len=32 does not divide into them (64 would): "
        "use cp=8 or 16."
    ]
    assert messages(cp=8, tp=4) == []
    assert messages(of(num_attention_heads=8), cp=8, tp=8) == ["tp=8 does not divide seq_len/cp=4: use tp=2 or 4."]
    assert messages(of(num_attention_heads=8), cp=5, tp=8) == [
        "cp=5 cuts a sequence into 10 chunks, two for each rank, and seq_len=32 does not divide into them (30 or 40 "
        "would): use cp=2 or 4."
    ]


def test_attention_that_a_cp_method_cannot_do() -> None:
    assert messages(of(num_key_value_heads=2), cp=4, cp_method="all_to_all") == [
        "cp_method=all_to_all gives each of the cp=4 ranks whole heads, and cp=4 does not divide "
        "num_key_value_heads=2: use cp_method=all_gather, cp=1 or cp=2."
    ]
    assert messages(of(num_key_value_heads=2), cp=2, tp=2, cp_method="all_to_all") == [
        "tp=2 does not divide num_key_value_heads/cp=1: use tp=1."
    ]
    assert messages(of(sliding_window=8), cp=2, cp_method="ring") == [
        "cp_method=ring takes every key past every rank, and layers with sliding_window=8 see few of seq_len=32: use "
        "cp_method=all_gather."
    ]
    assert messages(of(sliding_window=8), cp_method="ring") == []
    assert messages(of(sliding_window=32), cp=2, cp_method="ring") == []
    assert messages(of(sliding_window=8, global_layers=(0, 1)), cp=2, cp_method="ring") == []


EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("degrees", "sentence"),
    [
        ({"ep": 5, "dp_shard": 5}, "ep=5 does not divide num_experts=12: use ep=1."),
        (
            {"ep": 4, "dp_shard": 2},
            "ep=4 is more than the 2 ranks it borrows (dp_shard=2 x cp=1 x tp=1): use ep=1 or 2.",
        ),
        (
            {"ep": 4, "dp_shard": 3, "tp": 2},
            "ep=4 does not divide the 6 ranks it borrows (dp_shard=3 x cp=1 x tp=2): use ep=2, 3 or 6.",
        ),
        (
            {"ep": 8, "dp_shard": 6},
            "ep=8 does not divide num_experts=12 and is more than the 6 ranks it borrows (dp_shard=6 x cp=1 x tp=1): "
            "use ep=3 or 6.",
        ),
    ],
)
def test_experts_that_cannot_be_spread(degrees: dict[str, int], sentence: str) -> None:
    run = make_run(train={"sequences_per_step": degrees["dp_shard"]}, model={"experts": EXPERTS})
    assert messages(run, **degrees) == [sentence]


@pytest.mark.parametrize("degrees", [{"ep": 2, "tp": 2}, {"ep": 4, "dp_shard": 2, "tp": 2}, {"ep": 3, "dp_shard": 6}])
def test_experts_that_can(degrees: dict[str, int]) -> None:
    run = make_run(train={"sequences_per_step": degrees.get("dp_shard", 1)}, model={"experts": EXPERTS})
    assert messages(run, **degrees) == []


def test_tensor_parallel_cuts_what_feed_forward_there_is() -> None:
    """A model of experts alone has no feed-forward network to cut; a shared expert is one."""
    narrow = {"intermediate_size": 3, "experts": EXPERTS}
    assert messages(of(**narrow), tp=4) == []
    assert messages(of(**narrow | {"experts": EXPERTS | {"first_k_dense_replace": 1}}), tp=4) == [
        "tp=4 leaves ranks without a part of intermediate_size=3: use tp=1 or 2."
    ]
    shared = EXPERTS | {"shared_expert_intermediate_size": 5}
    assert messages(of(experts=shared), tp=4) == [
        "tp=4 leaves ranks without a part of experts.shared_expert_intermediate_size=5: use tp=1 or 2."
    ]


def test_matrices_that_cannot_be_cut() -> None:
    assert messages(of(num_key_value_heads=2), tp=3) == [
        "tp=3 does not divide num_attention_heads=4, num_key_value_heads=2 and seq_len=32: use tp=1 or 2."
    ]
    assert messages(of(num_key_value_heads=2), tp=4) == ["tp=4 does not divide num_key_value_heads=2: use tp=1 or 2."]
    assert messages(of(num_attention_heads=16, num_key_value_heads=8), tp=12) == [
        "tp=12 does not divide num_attention_heads=16, num_key_value_heads=8 and seq_len=32: use tp=4 or 8."
    ]
    wide = make_run(data={"seq_len": 12}, train={"sequences_per_step": 1}, model={"num_attention_heads": 8})
    assert messages(wide, tp=8) == ["tp=8 does not divide seq_len=12: use tp=2 or 4."]
    assert messages(of(qk_norm="full"), tp=2) == ["tp=2 cuts the norm that spans all heads (qk_norm=full): use tp=1."]
    assert messages(of(qk_norm="head"), tp=2) == []


def test_matrices_that_leave_a_card_idle() -> None:
    """Cut as torch.chunk cuts: 5 outputs over 4 cards are 2, 2, 1 and none; 7 are 2, 2, 2 and 1."""
    assert messages(of(intermediate_size=7, vocab_size=7), tp=4) == []
    assert messages(of(intermediate_size=5), tp=4) == [
        "tp=4 leaves ranks without a part of intermediate_size=5: use tp=1 or 2."
    ]
    assert messages(of(intermediate_size=3, vocab_size=2), tp=4) == [
        "tp=4 leaves ranks without a part of intermediate_size=3 and vocab_size=2: use tp=1 or 2."
    ]
    assert messages(of(intermediate_size=1, num_key_value_heads=2), tp=4) == [
        "tp=4 does not divide num_key_value_heads=2 and leaves ranks without a part of intermediate_size=1: use tp=1."
    ]


@given(st.integers(1, 40), st.integers(1, 12))
def test_no_card_is_idle_where_torch_chunk_gives_each_a_part(size: int, tp: int) -> None:
    chunks = [len(chunk) for chunk in np.array_split(range(size), range(-(-size // tp), size, -(-size // tp)))]
    run = of(intermediate_size=size, num_attention_heads=tp, head_dim=2)
    refusals = [m for m in messages(run, tp=tp) if "intermediate_size" in m]
    assert bool(refusals) == (len(chunks) < tp)


def test_stages_that_do_not_fit() -> None:
    spreads = "schedule=DualPipeV spreads stages over ranks, and pp=1 is one rank: use"
    assert messages(of(num_hidden_layers=4), schedule="DualPipeV", stages_per_rank=2) == [
        f"{spreads} pp=2 or schedule=1F1B stages_per_rank=1."
    ]
    assert messages(of(num_hidden_layers=3), schedule="DualPipeV", stages_per_rank=2) == [
        f"{spreads} schedule=1F1B stages_per_rank=1."
    ]
    assert messages(stages_per_rank=2) == ["stages_per_rank=2 does not fit schedule=1F1B: use stages_per_rank=1."]
    assert messages(of(num_hidden_layers=4), pp=2, schedule="ZBVZeroBubble") == [
        "stages_per_rank=1 does not fit schedule=ZBVZeroBubble: use stages_per_rank=2 or schedule=1F1B."
    ]
    assert messages(of(num_hidden_layers=6), pp=8) == ["pp=8 x stages_per_rank=1 makes 8 stages of 6 layers: use pp=6."]
    assert messages(of(num_hidden_layers=6), pp=2, schedule="Interleaved1F1B", stages_per_rank=4) == [
        "pp=2 x stages_per_rank=4 makes 8 stages of 6 layers: use stages_per_rank=3."
    ]
    assert messages(of(num_hidden_layers=6), pp=4, schedule="LoopedBFS", stages_per_rank=2) == [
        "pp=4 x stages_per_rank=2 makes 8 stages of 6 layers: use pp=3 or schedule=1F1B stages_per_rank=1."
    ]


def test_stage_cuts_that_do_not_make_up_the_layers() -> None:
    assert messages(of(num_hidden_layers=7), pp=2, stage_cuts=(3, 4)) == []
    assert messages(of(num_hidden_layers=7), pp=2, stage_cuts=(3, 3)) == [
        "stage_cuts=[3, 3] must be 2 counts of layers that sum to 7: use stage_cuts=[3, 4], or leave it out."
    ]
    assert messages(of(num_hidden_layers=7), pp=2, stage_cuts=(0, 7)) == [
        "stage_cuts=[0, 7] must be 2 counts of layers that sum to 7: use stage_cuts=[3, 4], or leave it out."
    ]
    assert messages(of(num_hidden_layers=7), pp=2, stage_cuts=()) == [
        "stage_cuts=[] must be 2 counts of layers that sum to 7: use stage_cuts=[3, 4], or leave it out."
    ]
    assert messages(of(num_hidden_layers=16), pp=9, stage_cuts=(1,) * 16) == [
        "stage_cuts=[1, 1, 1, 1, 1, 1, 1, 1] ... must be 9 counts of layers that sum to 16: leave it out."
    ]


def test_what_split_backwards_cannot_have() -> None:
    """Also on one data rank, where zero=3 shares nothing and still lets go of weights."""
    assert messages(of(num_hidden_layers=4), pp=2, schedule="DualPipeV", stages_per_rank=2, zero=3) == [
        "zero=3 lets go of weights after each forward, and schedule=DualPipeV needs them once for each of the two "
        "parts of a backward: use zero=1 or zero=2, or schedule=1F1B stages_per_rank=1."
    ]
    assert messages(pp=2, schedule="InterleavedZeroBubble", recompute="selective") == [
        "recompute=selective keeps what a backward needs until it was used once, and schedule=InterleavedZeroBubble "
        "uses it in each of the two parts of a backward: use recompute=none or recompute=full, or schedule=1F1B."
    ]


def test_sharing_nothing_over_several() -> None:
    assert messages(run_of(4), zero=0, dp_replicate=2, dp_shard=2) == [
        "zero=0 shares nothing, and dp_shard=2 asks for sharing: use dp_replicate=4 dp_shard=1, or zero=1, zero=2 or "
        "zero=3."
    ]


def test_a_step_that_does_not_divide() -> None:
    assert messages(run_of(10), dp_replicate=2, dp_shard=2) == [
        "a step of 10 sequences does not divide over the 4 data ranks (dp_replicate=2 x dp_shard=2): use "
        "train.sequences_per_step=8 or train.sequences_per_step=12, or make dp_replicate x dp_shard equal 1, 2 or 5."
    ]
    assert messages(run_of(3, in_tokens=True), dp_shard=4) == [
        "a step of 3 sequences is smaller than the 4 data ranks (dp_replicate=1 x dp_shard=4): use "
        "train.tokens_per_step=128, or make dp_replicate x dp_shard equal 1 or 3."
    ]
    assert messages(run_of(1 << 20), dp_replicate=1 << 20, dp_shard=3) == [
        "a step of 1048576 sequences is smaller than the 3145728 data ranks (dp_replicate=1048576 x dp_shard=3): make "
        "dp_replicate x dp_shard equal 524288 or 1048576."
    ]


def test_microbatches_that_do_not_make_a_step() -> None:
    assert messages(run_of(12), dp_shard=2, microbatches=2, sequences_per_microbatch=4) == [
        "microbatches=2 x sequences_per_microbatch=4 do not make the 6 sequences that each of 2 data ranks has in a "
        "step: use microbatches=2 sequences_per_microbatch=3, microbatches=3 sequences_per_microbatch=2 or "
        "microbatches=1 sequences_per_microbatch=6."
    ]


def test_ranks_that_are_not_there() -> None:
    eight = Cluster(servers=2, cards_per_server=4)
    assert messages(run_of(8), eight, dp_shard=4, microbatches=2) == [
        "dp_shard=4 needs 4 ranks, and there are 8: start 4 ranks, or use dp_shard=8."
    ]
    assert messages(run_of(4), eight, dp_shard=4) == [
        "dp_shard=4 needs 4 ranks, and there are 8: start 4 ranks, or choose degrees whose product is 8."
    ]
    assert messages(run_of(1), eight) == [
        "one rank needs 1 ranks, and there are 8: start 1 ranks, or choose degrees whose product is 8."
    ]


def test_all_refusals_are_told_at_once() -> None:
    wrong = Layout(
        pp=2, cp=5, tp=3, ep=2, zero=3, dp_shard=3, schedule="DualPipeV", stage_cuts=(1,), recompute="selective"
    )
    assert keys(check(wrong, run_of(1), Cluster())) == [
        "ep", "cp", "tp", "stages_per_rank", "stage_cuts", "zero", "recompute", "data_ranks", "world_size",
    ]  # fmt: skip
    with pytest.raises(BadInput) as refusal:
        require_legal(wrong, run_of(1), Cluster())
    assert str(refusal.value).split("\n") == [one.message for one in check(wrong, run_of(1), Cluster())]
