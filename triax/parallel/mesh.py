"""How do torch's device meshes mirror the rank grid of a Layout?"""

import torch
from torch.distributed.device_mesh import DeviceMesh

from triax.spec.layout import AXES, Layout


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Return the mesh with dims ``AXES`` in which every rank stands at ``layout.coordinate(rank)``.

    The mesh always lists its dims in the same order, whatever ``layout.order`` says: the order decides which rank
    numbers stand where, and so which axis stays inside a server.
    """
    degrees = [layout.degree(axis) for axis in layout.order]
    ranks = torch.arange(layout.world_size).reshape(degrees)
    ranks = ranks.permute([layout.order.index(axis) for axis in AXES]).contiguous()
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=AXES)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    assert tuple(coordinate) == layout.coordinate(torch.distributed.get_rank())
    return mesh


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the one-dim mesh of this rank's data peers: all that see other sequences, in data rank order."""
    return mesh["dp_replicate", "dp_shard"]._flatten("data")
