"""Which collectives does a rank take part in, between whom, with how many bytes, and over which links?"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch.distributed as dist
from torch import Tensor

from triax.spec.layout import AXES, Layout
from triax.verify.operands import tensors_in

Link = Literal["inside", "across"]
"""inside: all ranks of the collective are cards of one server. across: it needs the network between servers."""

_KINDS: Final = {
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
}
_SHARED_AXES: Final[dict[str, tuple[str, ...]]] = {
    "data": ("dp_replicate", "dp_shard"),
    "weights": ("dp_replicate", "dp_shard", "cp"),
    "sequence": ("cp", "tp"),
    "experts": ("dp_shard", "cp", "tp"),
}
"""Names of groups that lie along several axes at once."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One kind of collective between the same ranks, with the same bytes."""

    kind: str
    axis: str
    """The axis that the ranks lie along; ``data`` and others where it is several, ``all`` for all ranks."""
    peers: tuple[int, ...]
    """The ranks between which it is, this one included."""
    link: Link
    dtype: str
    payload_bytes: int
    """Bytes of the whole tensor: what an all-gather puts out, and what a reduce-scatter or an all-reduce takes in. Of
    an all-to-all, the larger of what goes and what comes."""
    phase: str

    @property
    def is_of_setup(self) -> bool:
        """Whether it is no part of a step: stages agree once, by whole numbers, that shapes are known beforehand."""
        return self.kind in ("send", "receive") and self.dtype == "int32"


class Traffic:
    """Names the collectives of one rank of a layout."""

    def __init__(self, layout: Layout, rank: int, cards_per_server: int) -> None:
        self._layout, self._rank, self._cards = layout, rank, cards_per_server
        self._axes: dict[tuple[int, ...], str] = {}
        self._groups: dict[str, tuple[int, ...]] = {}

    def collective(self, func: Any, args: Any, kwargs: Any, phase: str) -> tuple[Collective, list[Tensor]]:
        """Return what ``func`` of torch's ``c10d`` does, and the tensors that it reads and writes.

        Raises KeyError for one that is not known: nothing goes uncounted.
        """
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        kind = _KINDS[func._schema.name.removeprefix("c10d::")]
        tensors = tensors_in(given.values())
        group = dist.ProcessGroup.unbox(given["process_group"])
        peers = self._peers(group)
        axis = self.axis(peers)
        if kind in ("send", "receive"):
            peers = tuple(sorted((self._rank, peers[given["dst" if kind == "send" else "src"]])))
        sizes = [tensor.nbytes for tensor in tensors]
        # One output for each rank, of which the whole is made.
        payload = sum(sizes) - sizes[-1] if "output_tensors" in given and len(sizes) > 2 else max(sizes)
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        return Collective(kind, axis, peers, self.link(peers), dtype, payload, phase), tensors

    def _peers(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        name = group.group_name
        if name not in self._groups:
            self._groups[name] = tuple(dist.get_process_group_ranks(group))
        return self._groups[name]

    def link(self, peers: Iterable[int]) -> Link:
        """Return what joins ``peers``: servers are filled one after the other."""
        return "inside" if len({rank // self._cards for rank in peers}) == 1 else "across"

    def axis(self, peers: tuple[int, ...]) -> str:
        """Return the axis along which ``peers`` lie."""
        if peers not in self._axes:
            self._axes[peers] = self._named(set(peers))
        return self._axes[peers]

    def _named(self, peers: set[int]) -> str:
        layout = self._layout
        here = layout.coordinate(self._rank)
        others = [layout.coordinate(rank) for rank in peers]
        cut = [axis for axis in AXES if len({getattr(place, axis) for place in others}) > 1]
        if len(cut) == 1:
            whole = peers == set(layout.peers(self._rank, cut[0]))
            return cut[0] if whole else ("tied" if cut == ["pp"] else "ep")
        if not cut:
            return "self"
        if len(peers) == layout.world_size:
            return "all"
        assert here in others
        return next((name for name, axes in _SHARED_AXES.items() if set(cut) <= set(axes)), "all")


def volumes(collectives: Iterable[Collective]) -> Counter[tuple[str, str, Link, str]]:
    """Return payload bytes by (axis, kind, link, dtype), without what belongs to the set-up."""
    summed: Counter[tuple[str, str, Link, str]] = Counter()
    for each in collectives:
        if not each.is_of_setup:
            summed[each.axis, each.kind, each.link, each.dtype] += each.payload_bytes
    return summed
