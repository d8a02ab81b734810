"""How is one sequence cut over ranks, so that each keeps 1/cp of its activations, and how do its parts meet again?

Only attention looks from one position to another. Everything else sees the positions that are here, two chunks of each
sequence (``triax.spec.context``), and adds what they say to loss and gradients; these are summed over ``cp`` where they
are over the data axes. For attention there are three ways, with L = B S/cp positions on a rank, N query heads and K
key/value heads of width H; numbers that a rank puts on the links for each layer and microbatch:

    all_gather   Every rank gathers all keys and values, and again in the backward, so that only its own part is kept
                 between (Llama 3: Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2).
                 2 gathers of, and a reduction to, 2 L K H: 3 (cp - 1) 2 L K H
    ring         Keys and values go around while the scores against those that are here are made, and results are
                 merged (Liu et al. 2023, arXiv:2310.01889); in the backward their gradients go along and come home.
                 2 (cp - 1) 2 L K H, and cp 2 L K H in at least fp32
    all_to_all   Ranks exchange positions for heads, each attends with N/cp heads to whole sequences, and back (Jacobs
                 et al. 2023, arXiv:2309.14509). 2 (cp - 1)/cp (2 N + 2 K) L H

The first two agree on the gradient with the log-sums of the powers alone (``triax.nn.ranges``).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from triax.nn.attention import Context, attend
from triax.nn.decoder import Decoder
from triax.nn.ranges import attend_part, attend_ranges, merge_parts, ranges_backward
from triax.parallel.collectives import exchanged, gathered, summed_part
from triax.spec.context import chunk_count, positions_of
from triax.spec.layout import ContextMethod


def split_context(stage: Decoder, mesh: DeviceMesh, method: ContextMethod) -> None:
    """Let ``stage`` compute this rank's positions of each sequence along the ``cp`` axis of ``mesh``, in place."""
    context = mesh["cp"]
    if context.size() == 1:
        return
    kind = {"all_gather": GatheredContext, "ring": RingContext, "all_to_all": ExchangedContext}[method]
    stage.context = kind(context.get_group())
    for layer in stage.layers.values():
        layer.get_submodule("self_attn").context = stage.context  # type: ignore[assignment]


class SplitContext(Context):
    """Two chunks of each sequence are here."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.cp, self.cp_index = group.size(), group.rank()

    def part(self, whole_BS: Tensor) -> Tensor:
        """Return the head chunk and the tail chunk that are here."""
        return torch.cat([whole_BS[:, chunk.start : chunk.stop] for chunk in self._chunks(whole_BS.shape[1])], dim=1)

    def _chunks(self, seq_len: int, cp_index: int | None = None) -> Sequence[range]:
        return positions_of(seq_len, self.cp, self.cp_index if cp_index is None else cp_index)

    def positions(self, seq_len: int, device: torch.device, cp_index: int | None = None) -> Tensor:
        """Return the positions (S/cp,), ascending, that are here, or those of another rank."""
        return torch.cat([torch.arange(c.start, c.stop, device=device) for c in self._chunks(seq_len, cp_index)])

    def by_position(self, by_rank: Tensor) -> Tensor:
        """Return (X, S, H) in the order of positions, of which ranks have brought their parts in theirs."""
        order = self._order()
        return _reordered(by_rank, [order.index(chunk) for chunk in range(len(order))])

    def by_rank(self, by_position: Tensor) -> Tensor:
        """Return the inverse of ``by_position``."""
        return _reordered(by_position, self._order())

    def _order(self) -> list[int]:
        """Return the chunks of a sequence in the order of the ranks that have them."""
        count = chunk_count(self.cp)
        return [chunk.start for cp_index in range(self.cp) for chunk in self._chunks(count, cp_index)]


def _reordered(x: Tensor, places: Sequence[int]) -> Tensor:
    """Return (X, S, H) whose equal chunks are those at ``places`` of ``x``."""
    chunks = x.unflatten(1, (len(places), -1))
    reordered: Tensor = chunks.index_select(1, torch.tensor(places, device=x.device)).flatten(1, 2)
    return reordered


def first_seen(positions: Tensor, shape: torch.Size, cu_seqlens: Tensor | None, window: int | None) -> Tensor:
    """Return the first position (B, Q) that each of ``positions`` (Q,) sees in sequences of ``shape`` (B, S)."""
    batch, length = shape
    first = positions.new_zeros(1, 1)
    if cu_seqlens is not None:
        starts = cu_seqlens[:-1].to(positions.dtype).repeat_interleave(cu_seqlens.diff(), output_size=batch * length)
        rows = torch.arange(batch, device=positions.device).unsqueeze(1) * length
        first = starts.view(batch, length).index_select(1, positions) - rows
    if window is not None:
        first = torch.maximum(first, positions - window + 1)
    return first.expand(batch, len(positions))


class _OwnQueries(SplitContext):
    """Each rank attends from its own positions, with all heads."""

    function: type[torch.autograd.Function]

    def attend(
        self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, cu_seqlens: Tensor | None, window: int | None,
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        """See ``Context.attend``."""
        batch, length = q_BNSH.shape[0], q_BNSH.shape[2] * self.cp
        first = first_seen(self.positions(length, q_BNSH.device), torch.Size((batch, length)), cu_seqlens, window)
        scale = q_BNSH.shape[3] ** -0.5 if scale is None else scale
        attended: Tensor = self.function.apply(q_BNSH, k_BKSH, v_BKSH, first, scale, self)
        return attended


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, first_BQ: Tensor, scale: float, context: SplitContext
    ) -> Tensor:
        keys, values = _whole(k, v, context)
        wide, log_sums = attend_ranges(q, keys, values, first_BQ, _stop(first_BQ, context), scale)
        out: Tensor = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sums, first_BQ)
        ctx.scale, ctx.context = scale, context
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, log_sums, first_BQ = ctx.saved_tensors
        keys, values = _whole(k, v, ctx.context)
        stop_BQ = _stop(first_BQ, ctx.context)
        delta = _delta(grads[0], out, log_sums)
        grad_q, *of_whole = ranges_backward(grads[0], q, keys, values, log_sums, delta, first_BQ, stop_BQ, ctx.scale)
        flat = torch.stack(of_whole).to(k.dtype).flatten(0, 2)
        grad_k, grad_v = summed_part(ctx.context.by_rank(flat), ctx.context.group).view(2, *k.shape)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None


def _whole(k: Tensor, v: Tensor, context: SplitContext) -> Tensor:
    """Return the keys and values of all positions, (2, B, K, S, H)."""
    both = torch.stack((k, v))
    whole: Tensor = context.by_position(gathered(both.flatten(0, 2), context.group)).unflatten(0, both.shape[:3])
    return whole


def _stop(first_BQ: Tensor, context: SplitContext) -> Tensor:
    """Return the position (B, Q) behind the last that each query here sees: itself."""
    return (context.positions(first_BQ.shape[1] * context.cp, first_BQ.device) + 1).expand_as(first_BQ)


def _delta(grad: Tensor, out: Tensor, log_sums: Tensor) -> Tensor:
    """Return what ``ranges_backward`` asks for."""
    delta: Tensor = (grad.to(log_sums.dtype) * out).sum(dim=-1)
    return delta


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, first_BQ: Tensor, scale: float, context: SplitContext
    ) -> Tensor:
        held, merged = torch.stack((k, v)), None
        for step in range(context.cp):
            coming = _Passed(held, context) if step < context.cp - 1 else None
            part = attend_part(q, held[0], held[1], *_of_owner(step, first_BQ, context), scale)
            merged = part if merged is None else merge_parts(*merged, *part)
            held = coming.wait() if coming is not None else held
        assert merged is not None
        wide, log_sums = merged
        out: Tensor = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sums, first_BQ)
        ctx.scale, ctx.context = scale, context
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, log_sums, first_BQ = ctx.saved_tensors
        context: SplitContext = ctx.context
        delta = _delta(grads[0], out, log_sums)
        grad_q = torch.zeros_like(q, dtype=log_sums.dtype)
        held, returning = torch.stack((k, v)), None
        for step in range(context.cp):
            coming = _Passed(held, context) if step < context.cp - 1 else None
            ranges = _of_owner(step, first_BQ, context)
            of_queries, *of_held = ranges_backward(grads[0], q, held[0], held[1], log_sums, delta, *ranges, ctx.scale)
            grad_q += of_queries
            grad_held = torch.stack(of_held)
            if returning is not None:
                grad_held += returning.wait()
            returning = _Passed(grad_held, context)
            held = coming.wait() if coming is not None else held
        assert returning is not None
        grad_k, grad_v = returning.wait().to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None


def _of_owner(step: int, first_BQ: Tensor, context: SplitContext) -> tuple[Tensor, Tensor]:
    """Return which of the keys that are here after ``step`` steps each query sees: places of the first and the stop.

    Keys stand in the order of their positions, so those between two positions stand together.
    """
    owner = (context.cp_index - step) % context.cp
    keys = context.positions(first_BQ.shape[1] * context.cp, first_BQ.device, owner)
    first, stop = (torch.searchsorted(keys, place.contiguous()) for place in (first_BQ, _stop(first_BQ, context)))
    return first, stop


class _Passed:
    """A tensor on its way to the next rank of the ring, and the one that comes from the rank before."""

    def __init__(self, tensor: Tensor, context: SplitContext) -> None:
        group = context.group
        after, before = (dist.get_global_rank(group, (context.cp_index + by) % context.cp) for by in (1, -1))
        self._sent, self._coming = tensor, torch.empty_like(tensor)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, after, group),
                dist.P2POp(dist.irecv, self._coming, before, group),
            ]
        )

    def wait(self) -> Tensor:
        """Return what has come."""
        for work in self._works:
            work.wait()
        return self._coming


class GatheredContext(_OwnQueries):
    """Every rank gathers all keys and values."""

    function = _Gathered


class RingContext(_OwnQueries):
    """Keys and values go around."""

    function = _Ring


class ExchangedContext(SplitContext):
    """Each rank attends with its own part of the heads, from all positions."""

    def attend(
        self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, cu_seqlens: Tensor | None, window: int | None,
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        """See ``Context.attend``."""
        counts = [x.shape[1] // self.cp for x in (q_BNSH, k_BKSH, v_BKSH)]
        dealt = [x.unflatten(1, (self.cp, -1)) for x in (q_BNSH, k_BKSH, v_BKSH)]
        heads: Tensor = _ToHeads.apply(torch.cat(dealt, dim=2), self)  # type: ignore[no-untyped-call]
        q, k, v = heads.split(counts, dim=1)
        out = attend(q, k, v, cu_seqlens, window, scale)
        positions: Tensor = _ToPositions.apply(out, self)  # type: ignore[no-untyped-call]
        return positions.flatten(1, 2)


class _ToHeads(torch.autograd.Function):
    """(B, cp, heads, S/cp, H), the heads that each rank gets, to (B, heads, S, H) of the own ones."""

    @staticmethod
    def forward(ctx: Any, dealt: Tensor, context: SplitContext) -> Tensor:
        ctx.context = context
        return _to_heads(dealt, context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _to_positions(grads[0], ctx.context), None


class _ToPositions(torch.autograd.Function):
    """The inverse of ``_ToHeads``."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, context: SplitContext) -> Tensor:
        ctx.context = context
        return _to_positions(heads, context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _to_heads(grads[0], ctx.context), None


def _to_heads(dealt: Tensor, context: SplitContext) -> Tensor:
    batch, _, count, _, width = dealt.shape
    by_rank = exchanged(dealt.movedim(1, 0), context.group).movedim(0, 2).reshape(batch * count, -1, width)
    heads: Tensor = context.by_position(by_rank).unflatten(0, (batch, count))
    return heads


def _to_positions(heads: Tensor, context: SplitContext) -> Tensor:
    batch, count, length, width = heads.shape
    by_rank = context.by_rank(heads.flatten(0, 1)).view(batch, count, context.cp, length // context.cp, width)
    return exchanged(by_rank.movedim(2, 0), context.group).movedim(0, 1)
