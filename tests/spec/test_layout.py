"""Does every rank have one place, and every place one rank?"""

from itertools import pairwise, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from triax.spec.layout import AXES, Coordinate, Layout
from triax.spec.legal_values import divisors
from triax.spec.load import layout_words
from triax.spec.run import LayoutRequest

DEGREE = st.integers(1, 4)
ORDERS = st.permutations(AXES).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return Layout(**{axis: draw(DEGREE) for axis in AXES}, order=draw(ORDERS))


@given(layouts())
def test_ranks_and_coordinates_are_each_others_inverse(layout: Layout) -> None:
    places = [layout.coordinate(rank) for rank in range(layout.world_size)]
    assert [layout.rank(place) for place in places] == list(range(layout.world_size))
    assert set(places) == {Coordinate(*place) for place in product(*(range(layout.degree(axis)) for axis in AXES))}


@given(layouts(), st.data())
def test_ranks_count_fastest_along_the_innermost_axis(layout: Layout, data: st.DataObject) -> None:
    """The last axis of the order has stride 1, the one before it the degree of the last, and so on outwards."""
    rank = data.draw(st.integers(0, layout.world_size - 1))
    stride = 1
    for axis in reversed(layout.order):
        peers = layout.peers(rank, axis)
        assert [after - before for before, after in pairwise(peers)] == [stride] * (len(peers) - 1)
        stride *= layout.degree(axis)
    assert stride == layout.world_size


@given(layouts(), st.data())
def test_peers_differ_along_their_axis_alone(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    axis = data.draw(st.sampled_from(AXES))
    here, peers = layout.coordinate(rank), layout.peers(rank, axis)
    assert rank in peers
    assert [getattr(layout.coordinate(peer), axis) for peer in peers] == list(range(layout.degree(axis)))
    assert {layout.coordinate(peer)._replace(**{axis: 0}) for peer in peers} == {here._replace(**{axis: 0})}
    assert all(layout.peers(peer, axis) == peers for peer in peers)


@given(layouts())
def test_data_ranks_cover_each_part_of_the_data(layout: Layout) -> None:
    """Every part is seen by as many ranks as one copy of the model has, and by the same number whatever the order."""
    parts = [layout.data_rank(rank) for rank in range(layout.world_size)]
    copies = layout.pp * layout.cp * layout.tp
    assert sorted(parts) == sorted(list(range(layout.data_ranks)) * copies)
    for rank in range(layout.world_size):
        for axis in ("pp", "cp", "tp"):
            assert {parts[peer] for peer in layout.peers(rank, axis)} == {parts[rank]}


@given(layouts(), st.data())
def test_experts_borrow_the_ranks_of_a_replica(layout: Layout, data: st.DataObject) -> None:
    """Each (replica, shard, ep index) is one rank of each pipeline rank. The ranks of ``ep`` and of ``expert_shard``
    ascend along their axis, as torch numbers the ranks of a group."""
    ep = data.draw(st.sampled_from(divisors(layout.expert_ranks)))
    layout = layout.model_copy(update={"ep": ep, "zero": data.draw(st.integers(0, 3))})
    by_pipeline_rank: dict[int, dict[tuple[int, int, int], int]] = {}
    for rank in range(layout.world_size):
        by_pipeline_rank.setdefault(layout.coordinate(rank).pp, {})[layout.expert_place(rank)] = rank
    for places in by_pipeline_rank.values():
        grid = product(range(layout.expert_replicas), range(layout.expert_shards), range(ep))
        assert sorted(places) == list(grid)
        for replica, shard in product(range(layout.expert_replicas), range(layout.expert_shards)):
            family = [places[replica, shard, index] for index in range(ep)]
            assert len({layout.coordinate(rank).dp_replicate for rank in family}) == 1
            assert family == sorted(family)
        for replica, index in product(range(layout.expert_replicas), range(ep)):
            sharing = [places[replica, shard, index] for shard in range(layout.expert_shards)]
            assert sharing == sorted(sharing)
    assert (layout.expert_shards == 1) >= (layout.zero == 0)
    assert layout.expert_replicas * layout.expert_shards * ep == layout.dp_replicate * layout.expert_ranks


def test_experts_of_neighbours() -> None:
    """Inside tp first, since its ranks are neighbours; then across dp_shard."""
    layout = Layout(dp_shard=2, tp=4, ep=2, zero=3)
    assert [layout.expert_place(rank) for rank in range(8)] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (0, 3, 0), (0, 3, 1),
    ]  # fmt: skip
    assert [Layout(dp_shard=2, tp=2, ep=4).expert_place(rank)[2] for rank in range(4)] == [0, 1, 2, 3]
    assert [Layout(tp=4, ep=2, zero=0).expert_place(rank) for rank in range(4)] == [
        (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1),
    ]  # fmt: skip


@given(layouts(), ORDERS, st.data())
def test_the_order_changes_no_place(layout: Layout, order: tuple[str, ...], data: st.DataObject) -> None:
    """Which samples a place sees is the same in every order: only rank numbers move."""
    other = Layout.model_validate(layout.model_dump() | {"order": order})
    place = layout.coordinate(data.draw(st.integers(0, layout.world_size - 1)))
    assert layout.data_rank(layout.rank(place)) == other.data_rank(other.rank(place))


def test_the_seed_example() -> None:
    layout = Layout(pp=2, dp_shard=2, tp=2)
    assert [str(layout.coordinate(rank)) for rank in (0, 1, 7)] == [
        "pp=0 dp_replicate=0 dp_shard=0 cp=0 tp=0",
        "pp=0 dp_replicate=0 dp_shard=0 cp=0 tp=1",
        "pp=1 dp_replicate=0 dp_shard=1 cp=0 tp=1",
    ]
    assert (layout.peers(0, "pp"), layout.peers(0, "dp_shard"), layout.peers(0, "tp")) == ((0, 4), (0, 2), (0, 1))
    hybrid = Layout(dp_replicate=2, dp_shard=2)
    assert [hybrid.data_rank(rank) for rank in range(4)] == [0, 1, 2, 3]
    assert hybrid.data_rank(hybrid.rank(Coordinate(pp=0, dp_replicate=1, dp_shard=0, cp=0, tp=0))) == 2
    tp_outermost = Layout(pp=2, dp_shard=2, tp=2, order=("tp", "pp", "dp_replicate", "dp_shard", "cp"))
    assert tp_outermost.peers(0, "tp") == (0, 4)


@given(layouts(), st.integers())
def test_ranks_outside_have_no_place(layout: Layout, rank: int) -> None:
    if not 0 <= rank < layout.world_size:
        with pytest.raises(ValueError, match="outside a layout"):
            layout.coordinate(rank)


def test_every_order_names_each_axis_once() -> None:
    for order in permutations(AXES):
        assert Layout(order=order).order == order
    for wrong in (
        (),
        AXES[:4],
        (*AXES, "tp"),
        ("pp", "pp", "dp_shard", "cp", "tp"),
        ("pp", "dp", "dp_shard", "cp", "tp"),
    ):
        with pytest.raises(ValidationError):
            Layout.model_validate({"order": wrong})


@given(layouts())
def test_sizes_are_products(layout: Layout) -> None:
    cut = layout.model_copy(update={"sequences_per_microbatch": 3, "microbatches": 5})
    assert cut.sequences_per_step == cut.dp_replicate * cut.dp_shard * 15
    assert cut.world_size == cut.pp * cut.data_ranks * cut.cp * cut.tp


def test_a_request_asks_for_exactly_what_a_layout_has() -> None:
    assert list(LayoutRequest.model_fields) == list(Layout.model_fields)
    assert LayoutRequest().model_dump(exclude_none=True) == {}
    for name in Layout.model_fields:
        LayoutRequest.model_validate({name: getattr(Layout(), name)})


@given(layouts(), st.sampled_from(["1F1B", "GPipe"]), st.sampled_from(["none", "full"]), st.integers(1, 3))
def test_a_description_can_be_typed_again(layout: Layout, schedule: str, recompute: str, zero: int) -> None:
    said = layout.model_copy(update={"schedule": schedule, "recompute": recompute, "zero": zero, "order": AXES})
    if said.world_size == 1:
        assert said.describe().startswith("one rank")
        return
    words = [word.removeprefix("layout.").split("=") for word in layout_words(said.describe())]
    typed = Layout.model_validate({key: int(value) if value.isdigit() else value for key, value in words})
    assert (typed.world_size, typed.recompute) == (said.world_size, said.recompute)
    assert typed.schedule == said.schedule or said.pp == 1
    assert typed.zero == said.zero or said.dp_shard * said.cp == 1


def test_a_description_tells_what_stands_out() -> None:
    assert Layout().describe() == "one rank"
    assert Layout(dp_shard=4, zero=3).describe() == "dp_shard=4 zero=3"
    assert Layout(pp=2, stages_per_rank=2, schedule="Interleaved1F1B", ep=1, recompute="full").describe() == (
        "pp=2 schedule=Interleaved1F1B stages_per_rank=2 recompute=full"
    )
