"""Which parts of a tensor does this rank hold, and where do they lie in the whole?"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from triax.errors import BadInput

Range = tuple[int, int]
"""``(start, stop)`` of one dim."""

Box = tuple[Range, ...]
"""One range for each dim; ``()`` is the only element of a 0-dim tensor."""


@dataclass(frozen=True)
class Slice:
    """A block of the whole tensor that lies on this rank: ``whole[offset : offset + shape]`` is ``local``."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    local: torch.Tensor
    """A view of the rank's own memory: writing to it changes the tensor."""

    @property
    def box(self) -> Box:
        """The range of each dim of the whole tensor."""
        return tuple((start, start + size) for start, size in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True)
class _Split:
    """One mesh axis that splits a dim: its degree, this rank's place on it, the split factor of a _StridedShard."""

    degree: int
    index: int
    split_factor: int | None


def local_slices(tensor: torch.Tensor) -> list[Slice]:
    """Return the blocks of the whole tensor that this rank holds; none if it holds no element of it.

    A plain tensor is whole on every rank that has it. A DTensor may be replicated and split over any axes, each split
    as ``torch.chunk`` does it: dims need not divide, and the last ranks may go empty. Torch's own
    ``compute_local_shape_and_global_offset`` is not used: where a dim is uneven over tp and then split again over
    dp_shard, it names elements that the rank does not hold.

    Raises BadInput for a placement that does not say which elements a rank holds (``Partial``, or one unknown here),
    for a local tensor of another shape than its placements say, and for tensor types other than plain and DTensor.
    """
    if not isinstance(tensor, DTensor):
        ranges = [[(0, size)] for size in tensor.shape]
        return _blocks(_plain(tensor), ranges)
    placements, mesh = tensor.placements, tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    splits: list[list[_Split]] = [[] for _ in tensor.shape]
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            splits[placement.dim].append(_Split(mesh.size(axis), coordinate[axis], int(placement.split_factor)))
        elif isinstance(placement, Shard):
            splits[placement.dim].append(_Split(mesh.size(axis), coordinate[axis], None))
        elif not isinstance(placement, Replicate):
            raise BadInput(
                f"a tensor placed {placement} does not say which of its elements this rank holds: reduce it first, so "
                f"that every axis is Replicate or Shard; it is placed {placements}."
            )
    ranges = [_ranges(size, of_dim) for size, of_dim in zip(tensor.shape, splits, strict=True)]
    local = _plain(tensor.to_local())
    expected = tuple(sum(stop - start for start, stop in of_dim) for of_dim in ranges)
    if tuple(local.shape) != expected:
        raise BadInput(
            f"a tensor of shape {tuple(tensor.shape)} placed {placements} should be {expected} on this rank and is "
            f"{tuple(local.shape)}: only splits as torch.chunk makes them can be stored."
        )
    return _blocks(local, ranges)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        raise BadInput(
            f"a {type(tensor).__name__} with layout {tensor.layout} cannot be stored: only plain dense tensors, and "
            f"DTensors of these, can."
        )
    return tensor.detach()


def _blocks(local: torch.Tensor, ranges: Sequence[Sequence[Range]]) -> list[Slice]:
    """Return the blocks of ``local``, whose dims are the given ranges of the whole one after the other."""
    if local.numel() == 0:
        return []
    blocks = []
    positions = []
    for of_dim in ranges:
        ends = [0]
        for start, stop in of_dim:
            ends.append(ends[-1] + stop - start)
        positions.append(list(zip(of_dim, ends, strict=False)))
    for block in product(*positions):
        view = local
        for dim, ((start, stop), position) in enumerate(block):
            view = view.narrow(dim, position, stop - start)
        blocks.append(Slice(tuple(start for (start, _), _ in block), tuple(view.shape), view))
    return blocks


def _ranges(size: int, splits: Sequence[_Split]) -> list[Range]:
    """Return which ranges of a dim a rank holds, in the order of its memory; ``splits`` in mesh order."""
    order = _nesting(splits)
    if order is None:
        return _interleaved(size, splits)
    start, stop = 0, size
    for split in order:
        begin, end = _chunk(stop - start, split.degree, split.index)
        start, stop = start + begin, start + end
    return [(start, stop)] if size == 0 or stop > start else []


def _nesting(splits: Sequence[_Split]) -> list[_Split] | None:
    """Return the order in which these splits were made one inside the other; None if they were not.

    A Shard came before all that stand to its right. A _StridedShard is how ``fully_shard`` marks a tensor that tp (or
    ep) had split already: it came after its right neighbours, as many as multiply to its split factor. Replaying its
    index formula from left to right instead gives other elements as soon as the dim is uneven.
    """
    order: list[_Split] = []
    for split in reversed(splits):
        place, already = 0, 1
        while already < (split.split_factor or 1) and place < len(order):
            already *= order[place].degree
            place += 1
        if already != (split.split_factor or 1):
            return None
        order.insert(place, split)
    return order


def _interleaved(size: int, splits: Sequence[_Split]) -> list[Range]:
    """Return the ranges by the index formula of _StridedShard: cut into split_factor pieces, take a chunk of each."""
    held = [(0, size)]
    for split in splits:
        length = sum(stop - start for start, stop in held)
        taken: list[Range] = []
        for piece in range(split.split_factor or 1):
            first, last = _chunk(length, split.split_factor or 1, piece)
            begin, end = _chunk(last - first, split.degree, split.index)
            taken += _part(held, first + begin, first + end)
        held = taken
    return held


def _part(ranges: Sequence[Range], begin: int, end: int) -> list[Range]:
    """Return what lies between positions ``begin`` and ``end`` of these ranges put one after the other."""
    part = []
    position = 0
    for start, stop in ranges:
        low, high = max(begin - position, 0), min(end - position, stop - start)
        if low < high:
            part.append((start + low, start + high))
        position += stop - start
    return part


def _chunk(size: int, num_chunks: int, index: int) -> Range:
    """Return the range of one chunk as ``torch.chunk`` cuts: rounded up, so that the last chunks may be empty."""
    step = -(-size // num_chunks)
    return min(index * step, size), min((index + 1) * step, size)
