"""How does a sequence come together and apart between ranks, forwards and backwards?"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from triax.nn.card import is_on_card


def gather_sequence(part_BSD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the whole sequence (B, S, D) from the parts (B, S/T, D) of the ranks of ``group``.

    Backward: each rank's gradient of the whole is a partial sum, and each gets its own part of the full sum.
    """
    whole: Tensor = _Gather.apply(part_BSD, group)  # type: ignore[no-untyped-call]
    return whole


def scatter_sequence(partial_BSD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part (B, S/T, D) of the sum of ``partial`` (B, S, D) over ``group``; backward: a gather."""
    part: Tensor = _Scatter.apply(partial_BSD, group)  # type: ignore[no-untyped-call]
    return part


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part_BSD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(part_BSD, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return summed_part(grad_outputs[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_BSD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return summed_part(partial_BSD, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return gathered(grad_outputs[0], ctx.group), None


def gathered(part_BSD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the parts (B, S/T, D) of all ranks as (B, S, D), in rank order, without gradient."""
    batch, length, width = part_BSD.shape
    ranks = group.size()
    parts = part_BSD.new_empty(ranks * batch, length, width)
    dist.all_gather_single(parts, part_BSD.contiguous(), group=group)
    return parts.view(ranks, batch, length, width).transpose(0, 1).reshape(batch, ranks * length, width)


def summed_part(partial_BSD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part (B, S/T, D), in rank order, of the sum of ``partial`` (B, S, D), without gradient."""
    batch, length, width = partial_BSD.shape
    ranks = group.size()
    parts = partial_BSD.view(batch, ranks, length // ranks, width).transpose(0, 1).contiguous()
    if is_on_card(parts):
        mine = partial_BSD.new_empty(batch, length // ranks, width)
        dist.reduce_scatter_single(mine, parts.view(ranks * batch, length // ranks, width), group=group)
        return mine
    # gloo's reduce-scatter is an all-reduce inside and costs more than one; sending each its part and adding here moves
    # half as much, and the order of the sum is the same on every rank.
    return exchanged(parts, group).sum(dim=0)


def exchanged(dealt: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return what each rank of ``group`` has for this one, from ``dealt`` (T, ...): what this one has for each."""
    dealt = dealt.contiguous()
    received = torch.empty_like(dealt)
    dist.all_to_all_single(received, dealt, group=group)
    return received
