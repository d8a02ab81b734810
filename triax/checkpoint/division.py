"""Which blocks does each rank write, agreed by all of them once for a set of tensors?"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from triax.checkpoint.agree import Ranks
from triax.checkpoint.assign import Holding, assign
from triax.checkpoint.format import DTYPES, TensorEntry, boxes, check_name, dtype_name, shard_name
from triax.checkpoint.part import Block, Part
from triax.checkpoint.state import Slice, local_slices
from triax.errors import BadInput


class Division:
    """The division of the writing among ranks. Kept until what some rank holds changes."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._holdings: dict[str, Holding] | None = None
        self._part: Part | None = None
        self._writers: list[int] = []
        self._entries: dict[str, TensorEntry] = {}

    @property
    def part(self) -> Part:
        """What this rank writes. Only after ``agree``."""
        assert self._part is not None
        return self._part

    @property
    def writers(self) -> list[int]:
        """The ranks that write a file, in the order of the manifest's files; on rank 0 alone, empty on the others."""
        return self._writers

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """What the manifest says of every tensor, the same at every save; on rank 0 alone, empty on the others."""
        return self._entries

    @property
    def total_bytes(self) -> int:
        """About how much disk one checkpoint takes: its numbers, and 256 bytes for what is said of each block."""
        return sum(
            DTYPES[entry.dtype].itemsize * math.prod(entry.shape) + 256 * len(entry.files)
            for entry in self._entries.values()
        )

    def agree(self, step: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Slice]]:
        """Return the slices that this rank holds; afterwards the division fits what all ranks hold.

        Costs one number per rank if nothing has changed, else a gather to rank 0 and its answer. Raises BadInput on
        every rank for tensors that cannot be said, or that the ranks together do not hold once and whole.
        """
        slices: dict[str, list[Slice]] = {}
        holdings: dict[str, Holding] = {}
        problems: list[str] = []
        for name, tensor in tensors.items():
            try:
                check_name(name)
                slices[name] = local_slices(tensor)
                held = tuple(piece.box for piece in slices[name])
                holdings[name] = Holding(dtype_name(tensor.dtype), tuple(tensor.shape), held)
            except BadInput as error:
                problems.append(f"{name} cannot be saved: {error}")
        has_changed = holdings != self._holdings or bool(problems)
        any_changed, last_step, minus_first_step = self._ranks.maxima(has_changed, step, -step)
        assert last_step == -minus_first_step, f"ranks save different steps, {-minus_first_step} to {last_step}"
        if any_changed:
            if problems := self._ranks.union(problems[:1]):
                raise BadInput(problems[0])
            self._divide(holdings)
        return slices

    def _divide(self, holdings: dict[str, Holding]) -> None:
        said = self._ranks.gather({name: holding.to_plain() for name, holding in holdings.items()})
        answer = self._ranks.scatter(None if said is None else self._answers(said))
        if isinstance(answer, str):
            raise BadInput(answer)
        blocks = [
            Block(name, holdings[name].dtype, holdings[name].shape, tuple((start, stop) for start, stop in box))
            for name, box in answer
        ]
        self._part = Part(shard_name(self._ranks.rank, self._ranks.size), blocks)
        self._holdings = holdings

    def _answers(self, said: list[dict[str, list[Any]]]) -> list[Any]:
        """Return what rank 0 tells each rank: the blocks that it writes, or why they cannot be divided."""
        try:
            shares = assign([{name: Holding.from_plain(plain) for name, plain in of_rank.items()} for of_rank in said])
        except BadInput as error:
            return [str(error)] * len(said)
        blocks: list[list[Any]] = [[] for _ in said]
        for name, share in shares.items():
            for box, writer in zip(boxes(share.cuts), share.writers, strict=True):
                blocks[writer].append((name, box))
        self._writers = [rank for rank, of_rank in enumerate(blocks) if of_rank]
        file_of = {rank: index for index, rank in enumerate(self._writers)}
        self._entries = {
            name: TensorEntry(
                dtype=share.dtype,
                shape=share.shape,
                cuts=share.cuts,
                files=tuple(file_of[writer] for writer in share.writers),
            )
            for name, share in shares.items()
        }
        return blocks
