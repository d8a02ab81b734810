"""Do torch's device meshes put every rank where the layout says it sits?"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.harness.experts import with_experts
from tests.harness.ranks import run_ranks
from tests.harness.toy import ODD
from triax.parallel.mesh import EXPERT_AXES, build_mesh, data_mesh, expert_mesh, weight_mesh
from triax.spec.layout import AXES, Layout

ORDERS = (
    AXES,
    tuple(reversed(AXES)),
    ("tp", "pp", "dp_shard", "cp", "dp_replicate"),
    ("dp_shard", "cp", "tp", "dp_replicate", "pp"),
)


@contextmanager
def pretended_rank(rank: int, world: int) -> Iterator[None]:
    """Be one of many ranks without the others: torch's fake process group answers every collective at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def peers_by_axis(layout: Layout) -> dict[str, tuple[int, ...]]:
    """The ranks of this rank's groups, as torch made them; ``build_mesh`` itself compares the coordinates."""
    mesh = build_mesh(layout, "cpu")
    assert mesh.mesh_dim_names == AXES
    place = mesh.get_coordinate()
    assert place is not None
    found = {axis: tuple(dist.get_process_group_ranks(mesh.get_group(axis))) for axis in AXES}
    return found | {"place": tuple(place), "data": tuple(data_mesh(mesh).mesh.tolist())}


def peers_said(layout: Layout, rank: int) -> dict[str, tuple[int, ...]]:
    here = layout.coordinate(rank)
    row = [layout.peers(peer, "dp_shard") for peer in layout.peers(rank, "dp_replicate")]
    data_peers = sorted((peer for peers in row for peer in peers), key=layout.data_rank)
    said = {axis: layout.peers(rank, axis) for axis in AXES}
    return said | {"place": tuple(here), "data": tuple(data_peers)}


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_of_a_large_layout_stand_where_torch_puts_them(order: tuple[str, ...]) -> None:
    layout = Layout.model_validate({"pp": 2, "dp_replicate": 2, "dp_shard": 4, "cp": 3, "tp": 2, "order": order})
    assert layout.world_size == 96
    for rank in range(0, layout.world_size, 5):  # five divides no degree, so every index of every axis comes up
        with pretended_rank(rank, layout.world_size):
            assert peers_by_axis(layout) == peers_said(layout, rank)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("zero", [0, 2])
def test_ranks_of_experts_stand_where_torch_puts_them(order: tuple[str, ...], zero: int) -> None:
    degrees = {"pp": 2, "dp_replicate": 2, "cp": 3, "tp": 4} | ({"dp_shard": 2} if zero else {})
    layout = Layout.model_validate({**degrees, "ep": 6, "zero": zero, "order": order})
    for rank in range(0, layout.world_size, 5):
        with pretended_rank(rank, layout.world_size):
            mesh = expert_mesh(layout, with_experts(ODD), "cpu")
            assert mesh is not None
            assert mesh.mesh_dim_names == EXPERT_AXES
            assert tuple(mesh.get_coordinate() or ()) == layout.expert_place(rank)
            for axis in ("expert_shard", "ep"):
                group = mesh.get_group(axis)
                assert dist.get_group_rank(group, rank) == mesh.get_local_rank(axis)
                assert mesh[axis].mesh.tolist() == dist.get_process_group_ranks(group)


def test_there_is_no_mesh_of_experts_where_they_lie_as_all_other_weights_do() -> None:
    layout = Layout(dp_shard=4, pp=2)
    with pretended_rank(0, layout.world_size):
        assert expert_mesh(layout, with_experts(ODD), "cpu") is None
        assert expert_mesh(layout.model_copy(update={"ep": 2}), ODD, "cpu") is None


def test_real_ranks_agree() -> None:
    """On groups of gloo, where a wrong peer list would not even come up."""
    layout = Layout(pp=2, dp_shard=2, tp=2, order=("tp", "dp_replicate", "pp", "cp", "dp_shard"))
    found = run_ranks(lambda rank, world: peers_by_axis(layout), layout.world_size)
    assert found == [peers_said(layout, rank) for rank in range(layout.world_size)]


def places_of_weights(layout: Layout) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Where this rank stands in the mesh of weights, and the ranks of its groups, as torch made them."""
    mesh = weight_mesh(build_mesh(layout, "cpu"), layout)
    place = mesh.get_coordinate()
    assert place is not None
    groups = [mesh.get_group(dim) for dim in range(3)]
    assert tuple(group.rank() for group in groups) == tuple(place)
    return tuple(place), [tuple(dist.get_process_group_ranks(group)) for group in groups]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_ranks_that_share_weights_stand_where_torch_counts_them(order: tuple[str, ...], zero: int) -> None:
    """fully_shard takes a rank's part by its number in the group, and torch counts those from the lowest rank up."""
    degrees = {"pp": 2, "dp_replicate": 2, "dp_shard": 2 if zero else 1, "cp": 3, "tp": 2}
    layout = Layout.model_validate({**degrees, "order": order, "zero": zero})
    for rank in range(0, layout.world_size, 5):
        with pretended_rank(rank, layout.world_size):
            place, (replicas, shards, _) = places_of_weights(layout)
        assert place == (*layout.weight_place(rank), layout.coordinate(rank).tp)
        assert (len(replicas), len(shards)) == (layout.weight_replicas, layout.weight_shards)
        for peers, axes in ((replicas, ("dp_replicate", "dp_shard", "cp")), (shards, ("dp_shard", "cp"))):
            assert list(peers) == sorted(peers)
            for axis in set(AXES) - set(axes):
                assert {getattr(layout.coordinate(peer), axis) for peer in peers} == {
                    getattr(layout.coordinate(rank), axis)
                }
