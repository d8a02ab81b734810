"""What state do these tests save, and how does it lie on the ranks in each layout?"""

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

# Sizes that no degree divides, a weight with fewer rows than ranks, one of a single element, and one for tp to split.
WEIGHTS: Final[Mapping[str, tuple[int, ...]]] = {
    "embed_tokens.weight": (13, 6),
    "layers.0.gate_proj.weight": (11, 6),
    "layers.0.down_proj.weight": (6, 10),
    "layers.1.norm.weight": (3,),
    "layers.1.router.weight": (2, 5),
    "layers.1.scale": (1,),
}
TP_DIMS: Final = {"embed_tokens.weight": 0, "layers.0.gate_proj.weight": 0, "layers.0.down_proj.weight": 1}
DTYPES_OF: Final = {"layers.0.gate_proj.weight": torch.bfloat16, "layers.1.norm.weight": torch.float64}


def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The one true value of a tensor: any bits whatever, NaN and minus zero among them."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of what this rank holds: equal bytes, where equal numbers would let NaN differ."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().reshape(-1).contiguous().view(torch.uint8)


def replicated(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Every rank holds everything, as a plain tensor."""
    return _with_state({name: weight.clone() for name, weight in _weights().items()})


def sharded(rank: int, world: int) -> dict[str, torch.Tensor]:
    """fully_shard over all ranks."""
    return _with_state(_fully_sharded(_weights(), init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))))


def hybrid(rank: int, world: int) -> dict[str, torch.Tensor]:
    """fully_shard over half the ranks, twice."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return _with_state(_fully_sharded(_weights(), mesh))


def hybrid_over_tensor(rank: int, world: int) -> dict[str, torch.Tensor]:
    """tp = 2 first, unevenly, and fully_shard of what it left over the rest, with two replicas where ranks allow."""
    mesh = init_device_mesh("cpu", (2, world // 4, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    return _with_state(_fully_sharded(_over_tensor(mesh["tp"]), mesh["dp_replicate", "dp_shard"]))


def over_tensor(rank: int, world: int) -> dict[str, torch.Tensor]:
    """tp = 2 first, unevenly, and fully_shard of what it left over the rest."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp_shard", "tp"))
    return _with_state(_fully_sharded(_over_tensor(mesh["tp"]), mesh["dp_shard"]))


def pipelined(rank: int, world: int) -> dict[str, torch.Tensor]:
    """pp = 2: each half of the ranks has other weights, and both have the embedding, which is tied."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp_shard"))
    stage = mesh.get_local_rank("pp")
    mine = {name: weight for name, weight in _weights().items() if name.startswith(("embed_tokens", f"layers.{stage}"))}
    return _with_state(_fully_sharded(mine, mesh["dp_shard"]))


def split_everywhere(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Weights split by distribute_tensor over both axes of a mesh: dims 0 and 1, or dim 0 twice."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_shard", "tp"))
    return _with_state(
        {
            name: distribute_tensor(weight, mesh, [Shard(0), Shard(min(1, weight.ndim - 1))])
            for name, weight in _weights().items()
        }
    )


Layout = Callable[[int, int], dict[str, torch.Tensor]]
LAYOUTS: Final[Mapping[int, tuple[Layout, ...]]] = {
    1: (replicated, sharded),
    2: (sharded, hybrid, over_tensor, pipelined),
    3: (sharded,),
    4: (replicated, sharded, hybrid, over_tensor, hybrid_over_tensor, pipelined, split_everywhere),
    8: (sharded, hybrid, over_tensor, hybrid_over_tensor, pipelined, split_everywhere),
}
"""Layouts by number of ranks."""


def blank(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that lie on the ranks as these do and hold something else."""
    return {name: torch.full_like(tensor.detach(), 7) for name, tensor in tensors.items()}


def _weights() -> dict[str, torch.Tensor]:
    return {name: whole(name, shape, DTYPES_OF.get(name, torch.float32)) for name, shape in WEIGHTS.items()}


def _with_state(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights and optimizer state: placed as the weights are, and a replicated step of each."""
    state = dict(weights)
    for name, weight in weights.items():
        moment = whole(f"optimizer.exp_avg.{name}", tuple(weight.shape), weight.dtype)
        if isinstance(weight, DTensor):
            placed = torch.empty_like(weight.detach())
            _fill_by_hand(placed, moment)
            state[f"optimizer.exp_avg.{name}"] = placed
        else:
            state[f"optimizer.exp_avg.{name}"] = moment
        state[f"optimizer.step.{name}"] = torch.tensor(len(name), dtype=torch.float32)
    state["samples"] = torch.tensor([2**62 + 1, -1])
    return state


def _fill_by_hand(placed: DTensor, value: torch.Tensor) -> None:
    """Give a DTensor its part of ``value`` by gathering positions, which asks nobody but torch where the part lies."""
    positions = torch.arange(value.numel(), dtype=torch.int64).view(value.shape)
    mine = _parts(positions, placed)
    placed.to_local().copy_(value.reshape(-1)[mine.reshape(-1)].view(mine.shape))


def _parts(positions: torch.Tensor, like: DTensor) -> torch.Tensor:
    """What this rank holds of a tensor placed as ``like`` is: tp splits first, then what is sharded over it."""
    mesh, coordinate = like.device_mesh, like.device_mesh.get_coordinate()
    assert coordinate is not None
    is_over_tensor = mesh.mesh_dim_names is not None and mesh.mesh_dim_names[-1] == "tp"
    axes = list(range(mesh.ndim))
    if is_over_tensor and any("Strided" in type(placement).__name__ for placement in like.placements):
        axes = [mesh.ndim - 1, *axes[:-1]]
    for axis in axes:
        placement = like.placements[axis]
        if not isinstance(placement, Replicate):
            chunks = positions.chunk(mesh.size(axis), placement.dim)
            empty = positions.narrow(placement.dim, 0, 0)
            positions = chunks[coordinate[axis]] if coordinate[axis] < len(chunks) else empty
    return positions


def _over_tensor(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    def placement(name: str) -> Placement:
        return Shard(TP_DIMS[name]) if name in TP_DIMS else Replicate()

    return {name: distribute_tensor(weight, mesh, [placement(name)]) for name, weight in _weights().items()}


def _fully_sharded(weights: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """The weights as fully_shard holds them, which is the code whose placements must be understood."""
    names = list(weights)
    module = nn.ParameterList([nn.Parameter(weight) for weight in weights.values()])
    holder = nn.Module()
    holder.weights = module
    fully_shard(holder, mesh=mesh)
    return dict(zip(names, holder.weights, strict=True))
