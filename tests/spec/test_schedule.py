"""Do the schedule tables run to their end, cost what was published, hold what was published, and refuse nonsense?"""

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.errors import BadInput
from triax.spec.layout import ScheduleName
from triax.spec.schedule import (
    SCHEDULES,
    Action,
    Overlap,
    ScheduleTable,
    Slot,
    build,
    draw,
    legal,
    price,
    splits_backward,
    stage_owner,
    unit_cost,
    validate,
)


def stages_per_rank_of(name: str, at_most: int = 3) -> range:
    kind = SCHEDULES[name]
    return range(kind.min_stages_per_rank, min(kind.max_stages_per_rank or at_most, at_most) + 1)


@st.composite
def tables(draw_from: st.DrawFn, most_pp: int = 8, most_microbatches: int = 40) -> ScheduleTable:
    name = draw_from(st.sampled_from(sorted(SCHEDULES)))
    pp = draw_from(st.integers(SCHEDULES[name].min_pp, most_pp))
    stages_per_rank = draw_from(st.sampled_from(stages_per_rank_of(name)))
    return build(name, pp, stages_per_rank, draw_from(st.integers(1, most_microbatches)))


def text(table: ScheduleTable) -> list[str]:
    return [" ".join(map(str, row)) for row in table.rows]


def idle_forwards(table: ScheduleTable) -> float:
    """Idle time of the busiest rank, in forwards of one stage."""
    timeline = price(table)
    return timeline.makespan_s - max(map(timeline.busy_s, range(table.pp)))


def test_the_names_are_those_a_layout_can_say() -> None:
    assert set(SCHEDULES) == set(get_args(ScheduleName))


# What the rows are


def test_accumulation_without_a_pipeline_is_the_table_of_one_stage() -> None:
    assert text(build("1F1B", 1, 1, 3)) == ["0F0 0B0 0F1 0B1 0F2 0B2"]
    assert text(build("GPipe", 1, 1, 3)) == ["0F0 0F1 0F2 0B0 0B1 0B2"]


def test_1f1b_is_the_published_figure() -> None:
    # Narayanan et al. 2021, arXiv:2006.09503, figure 3b, for four ranks.
    assert text(build("1F1B", 4, 1, 4)) == [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3",
    ]


def test_zero_bubble_with_one_stage_per_rank_is_zb_h1() -> None:
    # Qi et al. 2023, arXiv:2401.10241: the weight gradients of later ranks wait for the end.
    assert text(build("InterleavedZeroBubble", 2, 1, 3)) == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]


def test_every_table_of_a_dense_grid_is_complete_and_ends() -> None:
    for name, kind in SCHEDULES.items():
        for pp, microbatches in itertools.product(range(kind.min_pp, 6), range(1, 13)):
            for stages_per_rank in stages_per_rank_of(name):
                validate(build(name, pp, stages_per_rank, microbatches))


@given(tables(most_pp=16, most_microbatches=70))
def test_every_table_is_complete_and_ends(table: ScheduleTable) -> None:
    validate(table)
    visits = [(visit.rank, visit.position) for visit in table.execution_order]
    assert sorted(visits) == [(rank, at) for rank, row in enumerate(table.rows) for at in range(len(row))]


@given(tables())
def test_backwards_are_split_where_the_schedule_says_and_never_at_stage_0(table: ScheduleTable) -> None:
    split = {action.stage for rank in range(table.pp) for action in table.actions(rank) if action.kind in "IW"}
    assert 0 not in split
    assert bool(split) <= splits_backward(table.name)


@given(tables())
def test_stages_lie_where_the_owner_table_says(table: ScheduleTable) -> None:
    for rank in range(table.pp):
        assert {action.stage for action in table.actions(rank)} == set(table.stages_of(rank))
    assert table.owners == stage_owner(table.name, table.pp, table.stages_per_rank)


def test_stage_placement() -> None:
    assert stage_owner("Interleaved1F1B", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert stage_owner("ZBVZeroBubble", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert build("DualPipeV", 3, 2, 6).stages_of(1) == (1, 4)


@given(tables())
def test_gradients_are_added_in_the_order_of_the_microbatches(table: ScheduleTable) -> None:
    # So that a pipeline adds up the same numbers in the same order as one process: equal bits, not only close.
    for rank in range(table.pp):
        for stage in table.stages_of(rank):
            added = [a.microbatch for a in table.actions(rank) if a.stage == stage and a.kind in "BW"]
            assert added == sorted(added)


# What it costs and holds


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_bubble_of_one_stage_per_rank_is_the_textbook_formula_exactly(name: str) -> None:
    for pp, microbatches in itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 8, 13)):
        timeline = price(build(name, pp, 1, microbatches))
        for rank in range(pp):
            assert timeline.bubble_fraction(rank) == (pp - 1) / (microbatches + pp - 1)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS"])
def test_several_stages_per_rank_divide_the_bubble(name: str) -> None:
    # Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2, and for any number of microbatches from pp up.
    for pp, stages_per_rank, extra in itertools.product((2, 3, 4), (2, 3), range(9)):
        microbatches = pp + extra
        timeline = price(build(name, pp, stages_per_rank, microbatches))
        chunks = microbatches * stages_per_rank
        assert {timeline.bubble_fraction(rank) for rank in range(pp)} == {(pp - 1) / (chunks + pp - 1)}


def test_split_backwards_leave_a_third_of_the_idle_time() -> None:
    # With F = I = W = 1 a whole backward is 2, so 1F1B idles 3 (pp - 1); ZB-H1 and ZB-V idle pp - 1 (Qi et al. 2023).
    for pp, microbatches in itertools.product((2, 4, 6), (12, 13, 24)):
        assert idle_forwards(build("1F1B", pp, 1, microbatches)) == 3 * (pp - 1)
        assert idle_forwards(build("InterleavedZeroBubble", pp, 1, microbatches)) == pp - 1
        assert idle_forwards(build("InterleavedZeroBubble", pp, 2, microbatches)) == pp - 1
        assert idle_forwards(build("ZBVZeroBubble", pp, 2, microbatches)) == pp - 1
        assert idle_forwards(build("DualPipeV", pp, 2, microbatches)) == 2 * (pp - 1)


@pytest.mark.parametrize(
    ("name", "stages_per_rank", "published"),
    [
        ("GPipe", 1, lambda p, r, m, v: m),
        ("1F1B", 1, lambda p, r, m, v: min(p - r, m)),
        ("Interleaved1F1B", 2, lambda p, r, m, v: min(2 * (p - r - 1) + (v - 1) * p + 1, m * v)),
        ("LoopedBFS", 2, lambda p, r, m, v: m * v),
        ("InterleavedZeroBubble", 1, lambda p, r, m, v: p),
        ("InterleavedZeroBubble", 2, lambda p, r, m, v: p * v),
        ("ZBVZeroBubble", 2, lambda p, r, m, v: 2 * p),
        ("DualPipeV", 2, lambda p, r, m, v: 2 * p + 1),
    ],
)
def test_microbatches_held_are_the_published_ones(
    name: str, stages_per_rank: int, published: Callable[[int, int, int, int], int]
) -> None:
    for pp, rounds in ((2, 3), (4, 2), (4, 5), (6, 3)):
        table = build(name, pp, stages_per_rank, pp * rounds)
        held = [table.max_in_flight(rank) for rank in range(pp)]
        assert held == [published(pp, rank, pp * rounds, stages_per_rank) for rank in range(pp)]


def test_chunks_held_tells_stages_and_what_is_left_after_the_input_gradient() -> None:
    table = ScheduleTable.from_csv("InterleavedZeroBubble", "0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1W0,1I1,1W1\n")
    assert table.chunks_held(1)[:, 0].tolist() == [[1, 0], [1, 0], [1, 1], [1, 1], [1, 0], [0, 1]]
    looped = build("LoopedBFS", 2, 2, 1)  # rank 0: 0F0 2F0 2B0 0B0
    assert looped.chunks_held(0)[:, :, 0].tolist() == [[1, 0], [1, 1], [1, 1], [1, 0]]


@given(tables())
def test_nothing_is_held_at_the_end(table: ScheduleTable) -> None:
    for rank in range(table.pp):
        last = table.chunks_held(rank)[-1]
        assert last.min() >= 0
        assert last.sum() == 1  # the chunk of the last slot itself


@given(tables(most_pp=5, most_microbatches=9), st.randoms(use_true_random=False), st.sampled_from([0.0, 0.3]))
def test_price_is_the_longest_path(table: ScheduleTable, random: Random, send_s: float) -> None:
    durations = {slot: random.uniform(0.1, 3.0) for row in table.rows for slot in row}
    timeline = price(table, durations.__getitem__, send_s)
    expected = ends_by_relaxation(table, durations, send_s)
    for row, ends in zip(table.rows, timeline.end_s, strict=True):
        assert ends == pytest.approx([expected[slot] for slot in row])
    assert timeline.makespan_s == pytest.approx(max(expected.values()))


def ends_by_relaxation(table: ScheduleTable, durations: dict[Slot, float], send_s: float) -> dict[Slot, float]:
    """When each slot ends, by raising all ends until every constraint holds: slow, and with no order to get wrong."""
    home = {action: (rank, slot) for rank, row in enumerate(table.rows) for slot in row for action in slot.parts}
    before: list[tuple[Slot, Slot, float]] = []  # the first must end so long before the second starts
    for row in table.rows:
        before += [(first, second, 0.0) for first, second in itertools.pairwise(row)]
    for action, (rank, slot) in home.items():
        stage, microbatch = action.stage, action.microbatch
        sources = {
            "F": [Action(stage - 1, "F", microbatch)],
            "B": [Action(stage + 1, "B", microbatch), Action(stage + 1, "I", microbatch)],
            "W": [],
        }["B" if action.kind == "I" else action.kind]
        for source in sources:
            if source in home:
                before.append((home[source][1], slot, send_s if home[source][0] != rank else 0.0))
    ends = dict(durations)
    moved = True
    while moved:
        moved = False
        for first, second, gap in before:
            earliest = ends[first] + gap + durations[second]
            if earliest > ends[second]:
                ends[second], moved = earliest, True
    return ends


def test_sends_are_waited_for_and_cost_the_sender_nothing() -> None:
    table = build("GPipe", 2, 1, 2)
    timeline = price(table, unit_cost, send_s=0.5)
    assert timeline.start_s == ((0.0, 1.0, 6.0, 8.0), (1.5, 2.5, 3.5, 5.5))
    assert timeline.makespan_s == 10.0
    assert timeline.busy_s(0) == 6.0
    one_way = price(table, unit_cost, send_s=lambda sender, receiver: 0.5 if sender < receiver else 0.0)
    assert one_way.start_s[0] == (0, 1, 5.5, 7.5)


def test_an_uneven_last_stage_costs_more_than_the_closed_form_says() -> None:
    table = build("1F1B", 4, 1, 8)
    timeline = price(table, lambda slot: unit_cost(slot) * (1.35 if slot.parts[0].stage == 3 else 1.0))
    assert timeline.makespan_s == pytest.approx(8 * 3 * 1.35 + 9)  # the slow rank never waits; the others do
    assert timeline.bubble_fraction(0) > 4 / 11 > 3 / 11


def test_an_overlap_starts_with_both_inputs_and_is_priced_as_a_pair() -> None:
    table = build("DualPipeV", 2, 2, 4)
    pairs = [slot for row in table.rows for slot in row if isinstance(slot, Overlap)]
    assert pairs
    assert all(unit_cost(pair) == 3 for pair in pairs)
    hidden = price(table, lambda slot: unit_cost(slot) - (1 if isinstance(slot, Overlap) else 0))
    assert hidden.makespan_s < price(table).makespan_s


# What is refused


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    pp=st.integers(-2, 5),
    stages_per_rank=st.integers(-1, 4),
    microbatches=st.integers(-1, 6),
)
def test_legal_says_exactly_what_build_makes(name: str, pp: int, stages_per_rank: int, microbatches: int) -> None:
    refusals = legal(name, pp, stages_per_rank, microbatches)
    if refusals:
        with pytest.raises(BadInput) as error:
            build(name, pp, stages_per_rank, microbatches)
        assert str(error.value) == "\n".join(refusal.message for refusal in refusals)
    else:
        validate(build(name, pp, stages_per_rank, microbatches))


@pytest.mark.parametrize(
    ("asked", "key", "sentence"),
    [
        (("1F1B", 4, 2, 8), "stages_per_rank", "stages_per_rank=2 does not fit schedule=1F1B: use 1."),
        (
            ("ZBVZeroBubble", 4, 3, 8),
            "stages_per_rank",
            "stages_per_rank=3 does not fit schedule=ZBVZeroBubble: use 2.",
        ),
        (
            ("LoopedBFS", 4, 1, 8),
            "stages_per_rank",
            "stages_per_rank=1 does not fit schedule=LoopedBFS: use 2 or more.",
        ),
        (
            ("DualPipeV", 1, 2, 8),
            "schedule",
            "schedule=DualPipeV spreads stages over ranks, and pp=1 is one rank: use schedule=1F1B, or pp=2 or more.",
        ),
        (("GPipe", 4, 1, 0), "microbatches", "microbatches=0 leaves nothing to run: use 1 or more."),
        (("GPipe", 0, 1, 1), "pp", "pp=0 is no number of pipeline ranks: use 1 or more."),
    ],
)
def test_each_refusal_names_its_key_and_what_would_be_legal(
    asked: tuple[str, int, int, int], key: str, sentence: str
) -> None:
    (refusal,) = legal(*asked)
    assert (refusal.key, refusal.message) == (key, sentence)


def test_all_refusals_come_at_once() -> None:
    assert [refusal.key for refusal in legal("DualPipeV", 1, 3, 0)] == ["schedule", "stages_per_rank", "microbatches"]


@pytest.mark.parametrize(
    ("name", "hint"), [("1f1b", "did you mean 1F1B"), ("zbv", "ZBVZeroBubble"), ("qqq", "use one of GPipe, 1F1B")]
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(BadInput, match=hint):
        build(name, 2, 1, 4)


# Proof by validate, and the text form


@given(tables(most_pp=4, most_microbatches=6), st.data())
def test_validate_finds_what_is_missing_or_doubled(table: ScheduleTable, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, table.pp - 1))
    at = data.draw(st.integers(0, len(table.rows[rank]) - 1))
    row = table.rows[rank]
    without = [(*row[:at], *row[at + 1 :]), (*row, row[at])]
    for broken in without:
        rows = (*table.rows[:rank], broken, *table.rows[rank + 1 :])
        with pytest.raises(BadInput):
            validate(replace(table, rows=rows))


@given(tables(most_pp=4, most_microbatches=6))
def test_validate_finds_a_deadlock(table: ScheduleTable) -> None:
    backwards_first = tuple(tuple(reversed(row)) for row in table.rows)
    with pytest.raises(BadInput, match="never ends: each waits for another, rank 0 at"):
        validate(replace(table, rows=backwards_first))


@pytest.mark.parametrize(
    ("csv", "fault"),
    [
        ("0F0,0F1,1B1\n1F0,1F1,1B0", "rank 0, which GPipe does not give stage 1"),
        ("0F0,0I0,0W0\n1F0", "each of 2 backwards once, as B or as I and W; it has 0 B, 1 I and 1 W"),
        ("0F0,0B0,0W0\n1F0,1B0", "each of 2 backwards once"),
        ("0F0,0B0\n1B0,1F0", "never ends: each waits for another, rank 0 at 0B0, rank 1 at 1B0"),
        ("0F0,0B0,0F0\n1F0,1B0", "0F0 is on rank 0 twice"),
        ("(0F0;0F1)OVERLAP_F_B,0B0,0B1\n1F0,1F1,1B0,1B1", "must pair a forward with a whole backward"),
        ("0F0,0B0\n1F0,1X0", "line 2: '1X0' is no action"),
        ("0F0,0B0\n1F0,1B0\n2F0,2B0\n3F0", "each of 4 backwards once, as B or as I and W; it has 3 B"),
        ("0F0,0B0\n3F0,3B0", "stages_per_rank=2 does not fit schedule=GPipe"),
        ("0F0,0B0\n2F0,2B0", "3 stages cannot be shared evenly by the 2 lines"),
        ("0F999999999,0B0\n1F0,1B0", "has 2 forwards, not stages x microbatches = 2000000000"),
        ("", "this text has no action"),
        ("\n\n", "this text has no action"),
    ],
)
def test_faults_of_a_table_in_text_are_sentences(csv: str, fault: str) -> None:
    with pytest.raises(BadInput, match=fault):
        ScheduleTable.from_csv("GPipe", csv)


@given(tables(most_pp=5, most_microbatches=9))
def test_text_form_round_trips(table: ScheduleTable) -> None:
    assert ScheduleTable.from_csv(table.name, table.to_csv()) == table


@given(st.text(alphabet="0123456789FBIWOVERLAP_;(),\n ", max_size=60))
def test_no_text_brings_more_than_a_sentence(csv: str) -> None:
    with contextlib.suppress(BadInput):
        validate(ScheduleTable.from_csv("GPipe", csv))


def test_text_form_is_the_one_torch_loads() -> None:
    assert build("1F1B", 2, 1, 2).to_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    pair = Overlap(Action(0, "F", 3), Action(3, "B", 1))
    assert str(pair) == "(0F3;3B1)OVERLAP_F_B"


# The picture


def test_picture_of_1f1b() -> None:
    assert draw(build("1F1B", 2, 1, 2)) == (
        "1F1B: pp=2, 2 stages, 2 microbatches; one step lasts 9 forwards, 33.3% of it idle\n"
        "           idle holds |\n"
        "rank 0    33.3%     2 |F0 F1       B0---    B1---\n"
        "rank 1    33.3%     1 |   F0 B0--- F1 B1---\n"
    )


def test_picture_of_one_rank_in_seconds() -> None:
    table = build("1F1B", 1, 1, 1)
    picture = draw(table, price(table, lambda slot: unit_cost(slot) / 100))
    assert picture.splitlines()[0] == "1F1B: pp=1, 1 stage, 1 microbatch; one step lasts 30 ms, 0.0% of it idle"
    assert picture.splitlines()[2].endswith("|F0 B0---")


@given(tables(most_pp=4, most_microbatches=8), st.integers(40, 200), st.randoms(use_true_random=False))
def test_picture_keeps_its_width_and_shows_every_rank(table: ScheduleTable, width: int, random: Random) -> None:
    durations = {slot: math.exp(random.uniform(-9, 1)) for row in table.rows for slot in row}
    for timeline in (None, price(table, durations.__getitem__, 0.01)):
        lines = draw(table, timeline, width).splitlines()[2:]
        assert max(map(len, lines)) <= width
        assert {line.split("|")[0].split()[1] for line in lines if line} == set(map(str, range(table.pp)))
