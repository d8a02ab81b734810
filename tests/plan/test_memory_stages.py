"""Do the closed forms hold as many microbatches, on the same layers, as the schedule tables that are executed?"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.plan.candidates import SCHEDULE_NAMES, Candidates
from triax.plan.engine import engine
from triax.plan.memory.stages import held_chunks, kinds_of_blocks, probes, stage_sizes
from triax.plan.network import Experts, Network, network_of
from triax.spec.model import ModelSpec
from triax.spec.schedule import SCHEDULES, ScheduleTable, build
from triax.spec.stages import stage_layers


@st.composite
def tables(draw: st.DrawFn) -> ScheduleTable:
    kind = SCHEDULES[draw(st.sampled_from(SCHEDULE_NAMES))]
    pp = draw(st.integers(kind.min_pp, 6))
    most = kind.max_stages_per_rank or 4
    stages = draw(st.integers(kind.min_stages_per_rank, most))
    return build(kind.name, pp, stages, draw(st.integers(1, 20)))


@given(tables(), st.data())
def test_microbatches_held_are_those_of_the_table(table: ScheduleTable, data: st.DataObject) -> None:
    """Whatever each of a rank's stages weighs: the peak is found exactly."""
    weights = data.draw(st.lists(st.integers(1, 3), min_size=table.stages_per_rank, max_size=table.stages_per_rank))
    schedule = SCHEDULE_NAMES.index(table.name)
    for rank in range(table.pp):
        phases, _ = held_chunks(
            schedule, table.pp, table.stages_per_rank, table.microbatches, np.array([rank]), is_uneven=True
        )
        walked = (table.chunks_held(rank).sum(axis=2) * weights).sum(axis=1).max()
        assert (phases[:, 0] * weights).sum(axis=1).max() == walked


@given(tables())
def test_with_equal_stages_one_phase_is_enough(table: ScheduleTable) -> None:
    ranks = np.arange(table.pp)
    schedule = SCHEDULE_NAMES.index(table.name)
    phases, _ = held_chunks(schedule, table.pp, table.stages_per_rank, table.microbatches, ranks)
    assert list(phases.sum(axis=2).max(axis=0)) == [table.max_in_flight(rank) for rank in ranks]


@given(tables())
def test_at_the_first_loss_the_last_rank_holds_what_the_table_says(table: ScheduleTable) -> None:
    last = table.num_stages - 1
    rank = table.owners[last]
    schedule = SCHEDULE_NAMES.index(table.name)
    _, at_loss = held_chunks(schedule, table.pp, table.stages_per_rank, table.microbatches, np.array([rank]))
    first = next(
        index
        for index, slot in enumerate(table.rows[rank])
        if any(action.stage == last and action.kind == "F" for action in slot.parts)
    )
    walked = table.chunks_held(rank).sum(axis=2)[first]
    if table.name in ("GPipe", "LoopedBFS"):
        # They hold more at each loss, and the last one is looked at.
        assert (at_loss == table.microbatches).all()
    elif table.name == "DualPipeV":
        # A pair runs as one there, and the forms count the pair that comes next.
        assert (at_loss[0] >= walked).all()
    else:
        assert list(at_loss[0]) == list(walked)


@given(st.integers(1, 24), st.integers(1, 24), st.integers(8, 200), st.integers(8, 2000))
def test_cuts_by_cost_are_the_trainers(layers: int, stages: int, inner: int, vocab: int) -> None:
    model = ModelSpec(
        hidden_size=64, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=vocab,
    )  # fmt: skip
    if stages <= layers:
        ours = stage_sizes(network_of(model), stages, None, is_by_cost=True)
        assert ours == tuple(len(each) for each in stage_layers(model, stages, None))


@given(st.integers(1, 40), st.integers(1, 40))
def test_even_cuts_leave_nothing_out(layers: int, stages: int) -> None:
    network = Network(layers, 64, 4, 4, 16, 128, 100)
    sizes = stage_sizes(network, stages, None, is_by_cost=False)
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)


def test_layers_with_experts_come_after_the_dense_ones() -> None:
    network = Network(6, 64, 4, 4, 16, 128, 100, experts=Experts(8, 2, 64, dense_layers=3))
    kinds = kinds_of_blocks(network, (2, 2, 2))
    assert [list(kinds[kind]) for kind in ("dense", "expert", "block")] == [[2, 1, 0], [0, 1, 2], [2, 2, 2]]


@pytest.mark.parametrize("cuts", [(1, 2, 3, 4), (4, 3, 2, 1), (3, 2, 2, 3)])
def test_with_cuts_of_ones_own_every_rank_is_looked_at(cuts: tuple[int, ...]) -> None:
    network = Network(10, 64, 4, 4, 16, 128, 100)
    at = probes(network, engine("megatron"), Candidates.of(pp=4, microbatches=8, cut=0, cuts=(cuts,)))
    held = dict(zip(at.rank[:, 0], at.held["block"][:, 0], strict=True))
    by_rank = [cuts[rank] * (4 - rank) for rank in range(4)]
    assert max(held.values()) == max(by_rank)
    assert at.layers["block"][:, 0].max() == max(cuts)


def test_candidates_of_many_pipelines_are_told_apart() -> None:
    network = Network(24, 64, 4, 4, 16, 128, 100)
    one_f_one_b, interleaved = SCHEDULE_NAMES.index("1F1B"), SCHEDULE_NAMES.index("Interleaved1F1B")
    candidates = Candidates.of(
        pp=[1, 4, 4, 4], stages_per_rank=[1, 1, 1, 2], microbatches=[7, 2, 16, 16],
        schedule=[one_f_one_b, one_f_one_b, one_f_one_b, interleaved],
    )  # fmt: skip
    at = probes(network, engine("megatron"), candidates, pipeline_rank=0)
    assert list(at.held["block"][0]) == [24, 2 * 6, 4 * 6, 11 * 3]
    assert list(probes(network, engine("megatron"), candidates, pipeline_rank=-1).rank[0]) == [0, 3, 3, 3]
