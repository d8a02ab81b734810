"""Which collectives did a rank take part in, between how many ranks, and with how many bytes?

They are seen where torch dispatches them, below every library that calls them.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_KINDS: Final = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
}


@dataclass(frozen=True)
class Collective:
    """One collective, as one rank called it."""

    kind: str
    ranks: int
    dtype: str
    payload_bytes: int
    """Bytes of the whole tensor: what an all-gather puts out, and what a reduce-scatter or an all-reduce takes in.

    A ring of N ranks moves (N - 1) / N of it over each link, and an all-reduce twice that (Patarasuk and Yuan 2009).
    """
    peers: tuple[int, ...] = field(default=(), compare=False)
    """The ranks between which it is."""


class Collectives(TorchDispatchMode):
    """Writes down every collective inside the ``with``. Fails on one it does not know: nothing goes uncounted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operations on local tensors
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1]
            assert name in _KINDS, f"a collective of a kind that is not counted: {func}"
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
            peers = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(given["process_group"])))
            self.seen.append(
                Collective(
                    kind=_KINDS[name],
                    ranks=len(peers),
                    peers=peers,
                    dtype=str(tensors[0].dtype).removeprefix("torch."),
                    payload_bytes=max(tensor.nbytes for tensor in tensors),
                )
            )
        return func(*args, **(kwargs or {}))
