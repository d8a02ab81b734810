"""What do all ranks hold together? Pieces of tensors, put together without torch's collectives or its arithmetic."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from triax.checkpoint.state import Box, local_slices


@dataclass(frozen=True)
class Piece:
    """A block of a whole tensor of ``shape`` that lay on one rank."""

    shape: tuple[int, ...]
    box: Box
    values: Tensor


Pieces = dict[str, list[Piece]]
"""What one rank holds, by name; a name without a piece is a tensor of which the rank holds no element."""


def pieces_of(named: Iterable[tuple[str, Tensor]]) -> Pieces:
    """Return copies of this rank's parts; a name that comes twice, as a tied embedding may, keeps both."""
    held: Pieces = {}
    for name, tensor in named:
        blocks = local_slices(tensor.detach())
        held.setdefault(name, []).extend(Piece(tuple(tensor.shape), block.box, block.local.clone()) for block in blocks)
    return held


def put_together(of_ranks: Iterable[Pieces]) -> dict[str, Tensor]:
    """Return the whole tensors; fail where an element is missing, or where two ranks hold other bits of it."""
    wholes: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for pieces in of_ranks:
        for name, piece in ((name, piece) for name, held in pieces.items() for piece in held):
            if name not in wholes:
                wholes[name] = torch.zeros(piece.shape, dtype=piece.values.dtype)
                filled[name] = torch.zeros(piece.shape, dtype=torch.bool)
            where = tuple(slice(start, stop) for start, stop in piece.box)
            here, values = filled[name][where], piece.values
            assert torch.equal(wholes[name][where][here], values[here]), f"replicas of {name} differ in {piece.box}"
            wholes[name][where], filled[name][where] = values, True
    missing = [name for name, there in filled.items() if not bool(there.all())]
    assert not missing, f"no rank holds some elements of {missing}"
    return wholes
