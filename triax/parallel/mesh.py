"""How do torch's device meshes mirror the rank grid of a Layout?

Groups are made here and not by torch's DeviceMesh, which would give them torch's patience of half an hour: a group
waits for a peer as long as the default group does, ``train.timeout_s``. It must be said when a group is made, since
gloo's receives do not heed a later change.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from triax.spec.layout import AXES, Layout
from triax.spec.model import ModelSpec

EXPERT_AXES: Final = ("expert_replicate", "expert_shard", "ep")


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Return the mesh with dims ``AXES`` in which every rank stands at ``layout.coordinate(rank)``.

    The mesh always lists its dims in the same order, whatever ``layout.order`` says: the order decides which rank
    numbers stand where, and so which axis stays inside a server.
    """
    degrees = [layout.degree(axis) for axis in layout.order]
    ranks = torch.arange(layout.world_size).reshape(degrees)
    ranks = ranks.permute([layout.order.index(axis) for axis in AXES]).contiguous()
    groups = [
        group_among(ranks.movedim(dim, -1).reshape(-1, layout.degree(axis)).tolist()) for dim, axis in enumerate(AXES)
    ]
    mesh = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=AXES)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    assert tuple(coordinate) == layout.coordinate(dist.get_rank())
    return mesh


def weight_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """Return the mesh with dims ``replicate``, ``shard`` and ``tp`` of the ranks that hold the weights of this rank's
    stages; a rank stands at ``layout.weight_place(rank)``. All ranks call this together.

    ``mesh`` is that of ``layout``, whose groups are used where they are the same.
    """
    ranks = torch.empty(layout.pp, layout.weight_replicas, layout.weight_shards, layout.tp, dtype=torch.int64)
    for rank in range(layout.world_size):
        here = layout.coordinate(rank)
        ranks[here.pp, *layout.weight_place(rank), here.tp] = rank
    groups = [mesh["dp_replicate"].get_group(), mesh["dp_shard"].get_group(), mesh["tp"].get_group()]
    for dim in (0, 1) if layout.cp > 1 else ():
        groups[dim] = group_among(ranks.movedim(dim + 1, -1).flatten(0, -2).tolist())
    mine = ranks[layout.coordinate(dist.get_rank()).pp]
    return DeviceMesh.from_group(groups, mesh.device_type, mine, mesh_dim_names=("replicate", "shard", "tp"))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the one-dim mesh of this rank's data peers: all that see other sequences, in data rank order."""
    dims = [AXES.index("dp_replicate"), AXES.index("dp_shard")]
    families = mesh.mesh.movedim(dims, [-2, -1]).flatten(-2).flatten(0, -2)
    (mine,) = families[(families == dist.get_rank()).any(dim=1)]
    return DeviceMesh.from_group([group_among(families.tolist())], mesh.device_type, mine, mesh_dim_names=("data",))


def sequence_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of the ranks that have parts of the same sequences: cp x tp. All ranks call this together."""
    if mesh["cp"].size() == 1 or mesh["tp"].size() == 1:
        return mesh["tp" if mesh["cp"].size() == 1 else "cp"].get_group()
    dims = [AXES.index("cp"), AXES.index("tp")]
    return group_among(mesh.mesh.movedim(dims, [-2, -1]).flatten(-2).flatten(0, -2).tolist())


def expert_mesh(layout: Layout, model: ModelSpec, device_type: str) -> DeviceMesh | None:
    """Return the mesh with dims ``EXPERT_AXES`` of the ranks of this pipeline rank; None where there are no experts, or
    where they are shared as all other weights are.

    All ranks call this together. A rank stands at ``layout.expert_place(rank)``.
    """
    if model.experts is None or layout.ep * layout.tp == 1:
        return None
    ranks = torch.empty(layout.pp, layout.expert_replicas, layout.expert_shards, layout.ep, dtype=torch.int64)
    for rank in range(layout.world_size):
        ranks[layout.coordinate(rank).pp, *layout.expert_place(rank)] = rank
    groups = [group_among(ranks.movedim(dim, -1).flatten(0, -2).tolist()) for dim in (1, 2, 3)]
    mine = ranks[layout.coordinate(dist.get_rank()).pp]
    return DeviceMesh.from_group(groups, device_type, mine, mesh_dim_names=EXPERT_AXES)


def group_among(families: Iterable[Sequence[int]]) -> dist.ProcessGroup:
    """Return the group of this rank's family; all ranks call this together, each with the same ``families``.

    Every rank is in one of ``families``. torch numbers the ranks of a group in ascending order.
    """
    mine: dist.ProcessGroup | None = None
    for ranks in families:
        group = dist.new_group(list(ranks), timeout=patience())
        if dist.get_rank() in ranks:
            mine = group
    assert mine is not None
    return mine


def patience() -> timedelta | None:
    """Return how long the default group waits for a peer; None where it is of a kind that never waits."""
    group = dist.group.WORLD
    assert group is not None
    options = group._get_backend(group._device_types[0]).options  # the same for every kind of device
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout
