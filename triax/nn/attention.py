"""How does a position look at earlier ones of its document? Grouped-query attention with rotary positions.

Shapes by the glossary: B sequences, S positions, D hidden, N query heads, K key/value heads, H head dim.
"""

from itertools import pairwise
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from triax.nn.card import is_on_card
from triax.nn.norm import RMSNorm
from triax.nn.rope import Rotation
from triax.spec.model import ModelSpec


class Attention(nn.Module):
    """Causal self-attention of one layer (Vaswani et al. 2017, arXiv:1706.03762; grouped queries: Ainslie et al. 2023,
    arXiv:2305.13245)."""

    def __init__(self, model: ModelSpec, layer: int) -> None:
        super().__init__()
        self.head_width = model.head_width
        self.window = model.sliding_window if model.reach(layer) == "local" else None
        self.scale = model.attention_multiplier
        self.context = WHOLE_SEQUENCES
        hidden = model.hidden_size
        query, key_value = model.num_attention_heads * model.head_width, model.kv_heads * model.head_width
        self.q_proj = nn.Linear(hidden, query, bias=model.attention_bias)
        self.k_proj = nn.Linear(hidden, key_value, bias=model.attention_bias)
        self.v_proj = nn.Linear(hidden, key_value, bias=model.attention_bias)
        self.o_proj = nn.Linear(query, hidden, bias=model.attention_out_bias)
        self.norms_heads = model.qk_norm == "head"
        has_norm = model.qk_norm != "none"
        self.q_norm = RMSNorm(self.head_width if self.norms_heads else query, model) if has_norm else None
        self.k_norm = RMSNorm(self.head_width if self.norms_heads else key_value, model) if has_norm else None

    def forward(self, x_BSD: Tensor, rotation: Rotation | None, cu_seqlens: Tensor | None) -> Tensor:
        """Return the attended values (B, S, D).

        ``rotation`` is None where the layer knows no positions. ``cu_seqlens`` (int32, ascending from 0 to B*S) cuts
        the flattened batch into documents that attention never crosses; None means that each sequence is one document.
        Where sequences are cut over ranks (``context``), ``x`` and ``rotation`` are of the positions that are here.
        """
        q_BNSH = self._heads(self.q_proj(x_BSD), self.q_norm)
        k_BKSH = self._heads(self.k_proj(x_BSD), self.k_norm)
        v_BKSH = self._heads(self.v_proj(x_BSD), None)
        if rotation is not None:
            q_BNSH, k_BKSH = rotation.apply(q_BNSH), rotation.apply(k_BKSH)
        attended = self.context.attend(q_BNSH, k_BKSH, v_BKSH, cu_seqlens, self.window, self.scale)
        projected: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, projected: Tensor, norm: RMSNorm | None) -> Tensor:
        """Return (B, heads, S, H), normalised where there is a norm."""
        if norm is not None and not self.norms_heads:
            projected = norm(projected)
        heads = projected.unflatten(2, (-1, self.head_width))
        if norm is not None and self.norms_heads:
            heads = norm(heads)
        turned: Tensor = heads.transpose(1, 2)
        return turned


def attend(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, cu_seqlens: Tensor | None, window: int | None, scale: float | None
) -> Tensor:
    """Return softmax(q k^T * scale) v over the positions each query may see, (B, N, S, H).

    A query sees itself and what comes before it in its document, and of that no more than ``window`` positions.
    ``scale`` None is 1/sqrt(H). No (S, S) mask is ever made.
    """
    length = q_BNSH.shape[2]
    if window is not None and window >= length:
        window = None
    if cu_seqlens is None and window is None:
        return _causal(q_BNSH, k_BKSH, v_BKSH, None, scale)
    if _has_packed_flash(q_BNSH):
        return _packed_flash(q_BNSH, k_BKSH, v_BKSH, cu_seqlens, window, scale)
    if cu_seqlens is None:
        return _causal(q_BNSH, k_BKSH, v_BKSH, window, scale)
    batch, num_heads, length, head_width = q_BNSH.shape
    pieces = []
    for start, stop in pairwise(cu_seqlens.tolist()):
        sequence, first = divmod(start, length)
        here = (slice(sequence, sequence + 1), slice(None), slice(first, first + stop - start))
        pieces.append(_causal(q_BNSH[here], k_BKSH[here], v_BKSH[here], window, scale).squeeze(0))
    flat_NTH = torch.cat(pieces, dim=1)
    return flat_NTH.view(num_heads, batch, length, head_width).transpose(0, 1)


class Context:
    """Which positions of each sequence are here: all of them, on one device."""

    def part(self, whole_BS: Tensor) -> Tensor:
        """Return what is here of a tensor (B, S, ...) over all positions."""
        return whole_BS

    def attend(
        self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, cu_seqlens: Tensor | None, window: int | None,
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        """Return what ``attend`` gives for the positions that are here; ``cu_seqlens`` are of whole sequences."""
        return attend(q_BNSH, k_BKSH, v_BKSH, cu_seqlens, window, scale)


WHOLE_SEQUENCES: Final = Context()
"""All positions on one device; it holds no state."""


def _causal(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, window: int | None, scale: float | None) -> Tensor:
    is_grouped = q_BNSH.shape[1] != k_BKSH.shape[1]
    length = q_BNSH.shape[2]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(
            q_BNSH, k_BKSH, v_BKSH, is_causal=True, scale=scale, enable_gqa=is_grouped
        )
    pieces = []
    for start in range(0, length, window):
        stop, first = min(start + window, length), max(start - window + 1, 0)
        queries = torch.arange(start, stop, device=q_BNSH.device).unsqueeze(1)
        keys = torch.arange(first, stop, device=q_BNSH.device)
        mask = (keys <= queries) & (keys > queries - window)
        q, k, v = q_BNSH[:, :, start:stop], k_BKSH[:, :, first:stop], v_BKSH[:, :, first:stop]
        pieces.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=is_grouped))
    return torch.cat(pieces, dim=2)


def _has_packed_flash(q_BNSH: Tensor) -> bool:
    """Whether torch's packed FlashAttention takes these heads: half precision on CUDA, widths of 8, 16, ... 256."""
    head_width = q_BNSH.shape[-1]
    is_half = q_BNSH.dtype in (torch.bfloat16, torch.float16)
    return is_on_card(q_BNSH) and is_half and head_width % 8 == 0 and head_width <= 256


def _packed_flash(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, cu_seqlens: Tensor | None, window: int | None, scale: float | None
) -> Tensor:
    """One kernel for all documents of the batch."""
    batch, num_heads, length, head_width = q_BNSH.shape
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q_BNSH.device)
    q_TNH, k_TKH, v_TKH = (x.transpose(1, 2).flatten(0, 1) for x in (q_BNSH, k_BKSH, v_BKSH))
    attended_TNH = varlen_attn(
        q_TNH, k_TKH, v_TKH, cu_seqlens, cu_seqlens, length, length, scale=scale,
        window_size=(-1 if window is None else window - 1, 0), enable_gqa=q_TNH.shape[1] != k_TKH.shape[1],
    )  # fmt: skip
    assert isinstance(attended_TNH, Tensor)
    return attended_TNH.view(batch, length, num_heads, head_width).transpose(1, 2)
