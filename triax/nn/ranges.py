"""How do queries attend to a range of keys each, and how are parts of that put together? Tile by tile.

No fused kernel takes any range for any query, gives the logarithm of the sum of powers, and knows fp64. With both, a
softmax over many keys can be made from softmaxes over some of them, and its gradient from parts alone (FlashAttention:
Dao et al. 2022, arXiv:2205.14135, section 3.1 and appendix B).

Shapes by the glossary, with Q queries and T keys. A query sees keys ``first`` up to, not including, ``stop``; where
``first >= stop`` it sees none, its output is zero and its log-sum is -inf. Sums are at least in fp32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from triax.nn.card import is_on_card

_TILE_NUMBERS: Final = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Scores at once (*assumed*): as many numbers as the loss makes logits at once (``triax.nn.loss``)."""

_MOST_ROWS: Final = 128
"""Queries at once: a tile is never near a square of positions."""


def _attended(
    q_BNQH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, first_BQ: Tensor, stop_BQ: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    keys_BKTH, values_BKTH = _factor(k_BKTH), _factor(v_BKTH)
    groups = k_BKTH.shape[1]
    batch, num_heads, length, width = q_BNQH.shape
    # Heads of a position lie together, as the projection that comes next reads them: no second copy is kept.
    out_BNQH = q_BNQH.new_zeros(batch, length, num_heads, width, dtype=_wide(q_BNQH)).transpose(1, 2)
    log_sums_BNQ = q_BNQH.new_full((batch, num_heads, length), -torch.inf, dtype=_wide(q_BNQH))
    for tile in _tiles(q_BNQH, k_BKTH, first_BQ, stop_BQ):
        scores = _scores(_grouped(q_BNQH, tile, groups), keys_BKTH, tile, scale)
        highest = scores.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
        powers = scores.sub_(highest).exp_()
        sums = powers.sum(dim=-1, keepdim=True)
        out = _product(powers, values_BKTH[:, :, tile.keys]).div_(sums.clamp(min=torch.finfo(scores.dtype).tiny))
        out_BNQH[:, :, tile.queries] = _ungrouped(out, tile)
        log_sums_BNQ[:, :, tile.queries] = _ungrouped(sums.log_().add_(highest), tile).squeeze(-1)
    return out_BNQH, log_sums_BNQ


attend_ranges = torch.library.custom_op("triax::attend_ranges", _attended, mutates_args=())
"""Return softmax(q k^T * scale) v over each query's keys, (B, N, Q, H), and the log-sums of its scores' powers,
(B, N, Q). One operation to whoever looks on, so that recomputation can keep its result and not its tiles."""

ATTEND_RANGES: Final = torch.ops.triax.attend_ranges.default
"""What such an onlooker sees."""

attend_part = torch.library.custom_op("triax::attend_part", _attended, mutates_args=())
"""The same over some of the keys, to be merged with others: nothing that recomputation keeps."""

BODIES: Final = {ATTEND_RANGES: _attended, torch.ops.triax.attend_part.default: _attended}
"""What each of the two runs, for an onlooker who counts what happens inside."""


def merge_parts(out: Tensor, log_sums: Tensor, other: Tensor, other_log_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return what attention over the keys of both parts gives; every query must see a key of the first."""
    both = torch.logaddexp(log_sums, other_log_sums)
    mine, theirs = (part.sub(both).exp_().unsqueeze(-1) for part in (log_sums, other_log_sums))
    return out * mine + other * theirs, both


def ranges_backward(
    grad_BNQH: Tensor, q_BNQH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, log_sums_BNQ: Tensor, delta_BNQ: Tensor,
    first_BQ: Tensor, stop_BQ: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what these keys add to the gradients of queries, and the gradients of keys and values, at least in fp32.

    ``log_sums`` and ``delta`` are over all keys of a query, not these alone; ``delta`` is the sum over H of the
    gradient times the output.
    """
    keys_BKTH, values_BKTH = _factor(k_BKTH), _factor(v_BKTH)
    groups = k_BKTH.shape[1]
    grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=_wide(x)) for x in (q_BNQH, k_BKTH, v_BKTH))
    for tile in _tiles(q_BNQH, k_BKTH, first_BQ, stop_BQ):
        queries, grad = _grouped(q_BNQH, tile, groups), _grouped(grad_BNQH, tile, groups)
        log_sums, delta = (_grouped(x.unsqueeze(-1), tile, groups) for x in (log_sums_BNQ, delta_BNQ))
        powers = _scores(queries, keys_BKTH, tile, scale).sub_(log_sums).exp_()
        grad_v[:, :, tile.keys] += _product(powers.mT, _factor(grad))
        grad_scores = _product(grad, values_BKTH[:, :, tile.keys].mT).sub_(delta).mul_(powers).mul_(scale)
        grad_q[:, :, tile.queries] = _ungrouped(_product(grad_scores, keys_BKTH[:, :, tile.keys]), tile)
        grad_k[:, :, tile.keys] += _product(grad_scores.mT, _factor(queries))
    return grad_q, grad_k, grad_v


@dataclass(frozen=True)
class _Tile:
    """Some queries, and the keys that any of them sees."""

    queries: slice
    keys: slice
    first: Tensor
    """(B, 1, 1, rows, 1)"""
    stop: Tensor
    """(B, 1, 1, rows, 1)"""

    @property
    def num_rows(self) -> int:
        return int(self.queries.stop - self.queries.start)


def _tiles(q_BNQH: Tensor, k_BKTH: Tensor, first_BQ: Tensor, stop_BQ: Tensor) -> Iterator[_Tile]:
    batch, num_heads, length, _ = q_BNQH.shape
    numbers = _TILE_NUMBERS["cuda" if is_on_card(q_BNQH) else "cpu"]
    rows = min(max(numbers // (batch * num_heads * k_BKTH.shape[2]), 1), _MOST_ROWS)
    for start in range(0, length, rows):
        queries = slice(start, min(start + rows, length))
        first, stop = first_BQ[:, queries], stop_BQ[:, queries]
        sees = first < stop
        if not bool(sees.any()):
            continue
        keys = slice(int(first[sees].min()), int(stop[sees].max()))
        yield _Tile(queries, keys, first[:, None, None, :, None], stop[:, None, None, :, None])


def _grouped(x_BNQH: Tensor, tile: _Tile, groups: int) -> Tensor:
    """Return the queries of ``tile``, (B, K, N/K * rows, H): all heads that share a key are rows of one product."""
    grouped: Tensor = x_BNQH[:, :, tile.queries].unflatten(1, (groups, -1)).flatten(2, 3)
    return grouped


def _ungrouped(rows: Tensor, tile: _Tile) -> Tensor:
    """Return (B, N, rows, H): the inverse of ``_grouped``."""
    ungrouped: Tensor = rows.unflatten(2, (-1, tile.num_rows)).flatten(1, 2)
    return ungrouped


def _scores(queries: Tensor, keys_BKTH: Tensor, tile: _Tile, scale: float) -> Tensor:
    """Return (B, K, N/K * rows, keys), -inf where a query does not see a key."""
    scores = _product(queries, keys_BKTH[:, :, tile.keys].mT).mul_(scale)
    places = torch.arange(tile.keys.start, tile.keys.stop, device=scores.device)
    # Keys between the last first and the first stop are seen by all: most of them, so that masks are small.
    before = max(int(tile.first.max()) - tile.keys.start, 0)
    behind = max(int(tile.stop.min()) - tile.keys.start, 0)
    of_rows = scores.unflatten(2, (-1, tile.num_rows))
    of_rows[..., :before].masked_fill_(places[:before] < tile.first, -torch.inf)
    of_rows[..., behind:].masked_fill_(places[behind:] >= tile.stop, -torch.inf)
    return scores


def _factor(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as the second factor of products: where they round to its dtype, wide."""
    return tensor if _multiplies_wide(tensor) else tensor.to(_wide(tensor))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in at least fp32; ``b`` is a ``_factor``."""
    a = a.to(b.dtype)
    if not _multiplies_wide(b):
        return a @ b
    product: Tensor = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32).unflatten(0, a.shape[:2])
    return product


def _multiplies_wide(tensor: Tensor) -> bool:
    """Whether torch puts the products of such numbers out in fp32: on CUDA alone."""
    return is_on_card(tensor) and tensor.dtype in (torch.bfloat16, torch.float16)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
