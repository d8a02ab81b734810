"""How does a position look at earlier ones of its document? Grouped-query attention with rotary positions.

Shapes by the glossary: B sequences, S positions, D hidden, N query heads, K key/value heads, H head dim.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from triax.spec.model import ModelSpec


class Attention(nn.Module):
    """Causal self-attention of one layer (Vaswani et al. 2017, arXiv:1706.03762; grouped queries: Ainslie et al. 2023,
    arXiv:2305.13245)."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.head_width = model.head_width
        query, key_value = model.num_attention_heads * model.head_width, model.kv_heads * model.head_width
        self.q_proj = nn.Linear(model.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(model.hidden_size, key_value, bias=False)
        self.v_proj = nn.Linear(model.hidden_size, key_value, bias=False)
        self.o_proj = nn.Linear(query, model.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, rotation: "Rotation", cu_seqlens: Tensor | None) -> Tensor:
        """Return the attended values (B, S, D).

        ``cu_seqlens`` (int32, ascending from 0 to B*S) cuts the flattened batch into documents that attention never
        crosses; None means that each sequence is one document.
        """
        batch, length, _ = x_BSD.shape
        heads = (batch, length, -1, self.head_width)
        q_BNSH = rotation.apply(self.q_proj(x_BSD).view(heads).transpose(1, 2))
        k_BKSH = rotation.apply(self.k_proj(x_BSD).view(heads).transpose(1, 2))
        v_BKSH = self.v_proj(x_BSD).view(heads).transpose(1, 2)
        if cu_seqlens is None:
            attended = _causal(q_BNSH, k_BKSH, v_BKSH)
        else:
            attended = _causal_within_documents(q_BNSH, k_BKSH, v_BKSH, cu_seqlens)
        projected: Tensor = self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        return projected


class Rotation:
    """The cosines and sines that turn pairs of numbers by their position (Su et al. 2021, arXiv:2104.09864).

    Kept in at least fp32, as the angles of late positions lose all meaning in bf16.
    """

    def __init__(self, cos_BSH: Tensor, sin_BSH: Tensor) -> None:
        self._cos = cos_BSH.unsqueeze(1)
        self._sin = sin_BSH.unsqueeze(1)

    @classmethod
    def at(cls, positions_BS: Tensor, model: ModelSpec, dtype: torch.dtype) -> "Rotation":
        """Return the rotation for ``positions`` (B, S), computed in ``dtype`` but never below fp32."""
        wide = torch.promote_types(dtype, torch.float32)
        pairs = torch.arange(0, model.head_width, 2, device=positions_BS.device, dtype=wide)
        frequencies = model.rope_theta ** -(pairs / model.head_width)
        angles = positions_BS.to(wide).unsqueeze(-1) * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return cls(angles.cos(), angles.sin())

    def apply(self, x_BNSH: Tensor) -> Tensor:
        """Return ``x`` turned: the first half of a head pairs with its second half, as in Hugging Face's layout."""
        wide = x_BNSH.to(self._cos.dtype)
        first, second = wide.chunk(2, dim=-1)
        turned = wide * self._cos + torch.cat((-second, first), dim=-1) * self._sin
        return turned.to(x_BNSH.dtype)


def _causal(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
    is_grouped = q_BNSH.shape[1] != k_BKSH.shape[1]
    return F.scaled_dot_product_attention(q_BNSH, k_BKSH, v_BKSH, is_causal=True, enable_gqa=is_grouped)


def _causal_within_documents(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Attend inside each document alone; no (S, S) mask is ever made."""
    if _has_packed_flash(q_BNSH):
        return _packed_flash(q_BNSH, k_BKSH, v_BKSH, cu_seqlens)
    batch, num_heads, length, head_width = q_BNSH.shape
    pieces = []
    for start, stop in pairwise(cu_seqlens.tolist()):
        sequence, first = divmod(start, length)
        here = (slice(sequence, sequence + 1), slice(None), slice(first, first + stop - start))
        pieces.append(_causal(q_BNSH[here], k_BKSH[here], v_BKSH[here]).squeeze(0))
    flat_NTH = torch.cat(pieces, dim=1)
    return flat_NTH.view(num_heads, batch, length, head_width).transpose(0, 1)


def _has_packed_flash(q_BNSH: Tensor) -> bool:
    """Whether torch's packed FlashAttention takes these heads: half precision on CUDA, widths of 8, 16, ... 256."""
    head_width = q_BNSH.shape[-1]
    is_half = q_BNSH.dtype in (torch.bfloat16, torch.float16)
    return q_BNSH.is_cuda and is_half and head_width % 8 == 0 and head_width <= 256


def _packed_flash(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, cu_seqlens: Tensor) -> Tensor:
    """One kernel for all documents of the batch."""
    batch, num_heads, length, head_width = q_BNSH.shape
    q_TNH, k_TKH, v_TKH = (x.transpose(1, 2).flatten(0, 1) for x in (q_BNSH, k_BKSH, v_BKSH))
    attended_TNH = varlen_attn(
        q_TNH, k_TKH, v_TKH, cu_seqlens, cu_seqlens, length, length,
        window_size=(-1, 0), enable_gqa=q_TNH.shape[1] != k_TKH.shape[1],
    )  # fmt: skip
    assert isinstance(attended_TNH, Tensor)
    return attended_TNH.view(batch, length, num_heads, head_width).transpose(1, 2)
