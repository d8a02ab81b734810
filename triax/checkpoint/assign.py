"""Which rank writes which block of which tensor?

Every block is written once, by one of the ranks that hold it; replicas share the writing so that bytes are spread
evenly. Pure functions on plain values: rank 0 calls them on what all ranks said.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, Final

from triax.checkpoint.format import DTYPES, boxes
from triax.checkpoint.state import Box
from triax.errors import BadInput

# A block of this many bytes that several ranks hold is cut so that they can share it; smaller ones stay whole.
_CUT_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Holding:
    """What one rank holds of one tensor; ``dtype`` is a name of format.DTYPES."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def to_plain(self) -> list[Any]:
        """Return the holding as JSON values."""
        return [self.dtype, self.shape, self.boxes]

    @staticmethod
    def from_plain(value: list[Any]) -> "Holding":
        """Return the holding whose ``to_plain`` is ``value``."""
        dtype, shape, held = value
        return Holding(dtype, tuple(shape), tuple(tuple((start, stop) for start, stop in box) for box in held))


@dataclass(frozen=True)
class Share:
    """How one tensor is written: a grid of blocks by the cuts of each dim, and in row-major order the rank for each."""

    dtype: str
    shape: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    writers: tuple[int, ...]


def assign(holdings: Sequence[Mapping[str, Holding]]) -> dict[str, Share]:
    """Return who writes what, given what every rank holds, by rank; names in sorted order.

    Blocks that only one rank holds go to it; the others, large ones first, each to the holder with the fewest bytes so
    far. Raises BadInput where ranks mean different tensors by one name, or do not hold a tensor once and whole.
    """
    grids = {name: _grid(name, holdings) for name in sorted({name for of_rank in holdings for name in of_rank})}
    blocks = [
        (len(holders) > 1, -_num_bytes(grid.dtype, box), name, index)
        for name, grid in grids.items()
        for index, (box, holders) in enumerate(zip(boxes(grid.cuts), grid.holders, strict=True))
    ]
    load = [0] * len(holdings)
    writers = {name: [0] * len(grid.holders) for name, grid in grids.items()}
    for _, minus_bytes, name, index in sorted(blocks):
        writer = min(grids[name].holders[index], key=load.__getitem__)
        load[writer] -= minus_bytes
        writers[name][index] = writer
    return {name: Share(grid.dtype, grid.shape, grid.cuts, tuple(writers[name])) for name, grid in grids.items()}


@dataclass(frozen=True)
class _Grid:
    """One tensor cut into blocks, and for each block in row-major order the ranks that hold it."""

    dtype: str
    shape: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    holders: list[list[int]]


def _grid(name: str, holdings: Sequence[Mapping[str, Holding]]) -> _Grid:
    """Return the grid in which the ranks together hold a tensor; raise BadInput if it is none."""
    holders: dict[Box, list[int]] = {}
    first: Holding | None = None
    for rank, of_rank in enumerate(holdings):
        holding = of_rank.get(name)
        if holding is None:
            continue
        first = first or holding
        if (holding.dtype, holding.shape) != (first.dtype, first.shape):
            raise BadInput(
                f"ranks mean different tensors by {name!r}: {first.dtype} {first.shape} and, on rank {rank}, "
                f"{holding.dtype} {holding.shape}."
            )
        for box in holding.boxes:
            holders.setdefault(box, []).append(rank)
    assert first is not None
    if math.prod(first.shape) == 0:
        return _Grid(first.dtype, first.shape, tuple((0, size) if size else (0,) for size in first.shape), [])
    ranges = [sorted({box[dim] for box in holders}) for dim in range(len(first.shape))]
    tiles = all(
        of_dim and of_dim[0][0] == 0 and of_dim[-1][1] == size and all(a[1] == b[0] for a, b in pairwise(of_dim))
        for of_dim, size in zip(ranges, first.shape, strict=True)
    )
    # Distinct boxes of a product of tilings, as many as the product has: each block is there, and once.
    if not tiles or len(holders) != math.prod(map(len, ranges)):
        held = ", ".join(str(box) for box in list(holders)[:4]) + (", ..." if len(holders) > 4 else "")
        raise BadInput(
            f"the ranks together do not hold {name!r} {first.shape} once and whole: they hold {held or 'nothing'}."
        )
    by_block = [holders[box] for box in product(*ranges)]
    cuts = tuple((0, *(stop for _, stop in of_dim)) for of_dim in ranges)
    return _cut(first, cuts, by_block)


def _cut(tensor: Holding, cuts: tuple[tuple[int, ...], ...], by_block: list[list[int]]) -> _Grid:
    """Cut large blocks that several ranks hold into ranges of rows, so that these ranks can share the writing."""
    largest = max(_num_bytes(tensor.dtype, box) for box in boxes(cuts))
    pieces = min(min(map(len, by_block)), -(-largest // _CUT_BYTES))
    if pieces < 2 or not tensor.shape:
        return _Grid(tensor.dtype, tensor.shape, cuts, by_block)
    rows = [0]
    per_row_range: list[int] = []
    for start, stop in pairwise(cuts[0]):
        step = -(-(stop - start) // pieces)
        ends = [*range(start + step, stop, step), stop]
        rows += ends
        per_row_range.append(len(ends))
    per_row = len(by_block) // (len(cuts[0]) - 1)
    finer = [
        holders
        for index, repeats in enumerate(per_row_range)
        for _ in range(repeats)
        for holders in by_block[index * per_row : (index + 1) * per_row]
    ]
    return _Grid(tensor.dtype, tensor.shape, (tuple(rows), *cuts[1:]), finer)


def _num_bytes(dtype: str, box: Box) -> int:
    return DTYPES[dtype].itemsize * math.prod(stop - start for start, stop in box)
