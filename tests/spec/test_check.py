"""Is every illegal layout refused with advice that is legal, and every legal one let through?"""

import re
from collections.abc import Iterator
from typing import Any

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
from triax.spec.schedule import SCHEDULES, legal

SMALL = st.integers(1, 4)
LAYOUTS = st.builds(
    Layout,
    **dict.fromkeys((*AXES, "ep", "stages_per_rank", "sequences_per_microbatch", "microbatches"), SMALL),
    zero=st.integers(0, 3),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    stage_cuts=st.none() | st.lists(SMALL, max_size=3),
    recompute=st.sampled_from(["none", "selective", "full"]),
    order=st.permutations(AXES),
)


def run_of(sequences: int, *, in_tokens: bool = False) -> Run:
    size: Said = {"sequences_per_step": None, "tokens_per_step": sequences * 32} if in_tokens else {
        "sequences_per_step": sequences
    }  # fmt: skip
    return make_run(train=size)


RUNS = st.builds(run_of, st.integers(1, 64), in_tokens=st.booleans())
CLUSTERS = st.builds(Cluster, servers=st.integers(1, 4), cards_per_server=st.integers(1, 8))


def alternatives(refusal: Refusal) -> Iterator[Said]:
    """The ways out that a refusal offers, each as the settings it asks for; ``ranks`` is how many to start."""
    advice = refusal.message.removesuffix(".").rpartition(": ")[2]
    if advice == "leave it out":
        yield {refusal.key: None}
        return
    advice, _, degrees = advice.partition("make dp_replicate x dp_shard equal ")
    yield from ({"data_ranks": int(number)} for number in re.findall(r"\d+", degrees))
    for option in re.split(r",? or |, ", advice.removesuffix(", or ")):
        pairs = re.findall(r"([a-z_.]+)=(\w+)", option)
        if pairs:
            yield {key.removeprefix("train."): int(value) if value.isdigit() else value for key, value in pairs}
        elif ranks := re.fullmatch(r"start (\d+) ranks", option):
            yield {"ranks": int(ranks[1])}
        elif number := re.fullmatch(r"use (\d+)", option):
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
            assert set(keys(left)) - set(keys(refusals)) <= {"data_ranks", "microbatches", "world_size"}


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


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.integers(1, 3))
def test_what_is_trained_is_not_refused(replicate: int, shard: int, zero: int, each: int, count: int) -> None:
    layout = Layout(
        dp_replicate=replicate, dp_shard=1 if zero == 0 else shard, zero=zero, sequences_per_microbatch=each,
        microbatches=count,
    )  # fmt: skip
    run = run_of(layout.sequences_per_step)
    assert check(layout, run, Cluster(cards_per_server=layout.world_size)) == []
    require_legal(layout, run)


@given(st.sampled_from(sorted(SCHEDULES)), SMALL, st.integers(1, 3))
def test_schedules_are_judged_by_their_own_rules(name: str, stages_per_rank: int, microbatches: int) -> None:
    layout = Layout(schedule=name, stages_per_rank=stages_per_rank, microbatches=microbatches)
    refusals = check(layout, run_of(microbatches))
    assert bool(refusals) == bool(legal(name, 1, stages_per_rank, microbatches))


def messages(run: Run | None = None, cluster: Cluster | None = None, **changes: Any) -> list[str]:
    return [refusal.message for refusal in check(Layout(**changes), run or run_of(1), cluster)]


def test_what_this_version_does_not_train() -> None:
    assert messages(tp=2, pp=2, cp=2, ep=2) == [
        "pp=2 is not trained by this version of triax: use pp=1.",
        "cp=2 is not trained by this version of triax: use cp=1.",
        "tp=2 is not trained by this version of triax: use tp=1.",
        "ep=2 asks for experts, and this model has none: use ep=1.",
    ]


def test_pipelines_without_one() -> None:
    why = "needs pp=2 or more, which is not trained by this version of triax"
    assert messages(schedule="Interleaved1F1B", stages_per_rank=2) == [
        f"schedule=Interleaved1F1B {why}: use schedule=1F1B stages_per_rank=1."
    ]
    assert messages(stages_per_rank=2) == ["stages_per_rank=2 does not fit schedule=1F1B: use 1."]
    assert messages(stage_cuts=(1, 1)) == [f"stage_cuts=[1, 1] {why}: leave it out."]


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
    with pytest.raises(BadInput) as refusal:
        require_legal(Layout(tp=2, zero=0, dp_shard=3, schedule="DualPipeV"), run_of(1), Cluster())
    assert len(str(refusal.value).split("\n")) == 5
