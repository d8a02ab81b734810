"""What does a token begin as: its row of a matrix, whose gradient is the sum over all places of the token."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triax.nn.card import is_on_card


class Embedding(nn.Embedding):
    """Rows of a matrix (V, D) by token."""

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return the rows of ``tokens``, (B, S, D)."""
        return look_up(self.weight, tokens_BS)


def look_up(rows_VD: Tensor, tokens_BS: Tensor) -> Tensor:
    """Return the rows of ``tokens``, (B, S, D); their gradient is summed in at least fp32 and rounded once.

    On CPU torch adds it up token by token in the dtype of the rows: a bf16 sum of equal numbers stops growing at 256 of
    them, so that the gradient of a common token would depend on how many stand in one microbatch.
    """
    if is_on_card(rows_VD) or rows_VD.dtype not in (torch.bfloat16, torch.float16):
        return F.embedding(tokens_BS, rows_VD)
    found: Tensor = _LookUp.apply(rows_VD, tokens_BS)  # type: ignore[no-untyped-call]
    return found


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_VD: Tensor, tokens_BS: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_BS)
        ctx.shape, ctx.dtype = rows_VD.shape, rows_VD.dtype
        return F.embedding(tokens_BS, rows_VD)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (tokens_BS,) = ctx.saved_tensors
        (grad_BSD,) = grad_outputs
        total_VD = grad_BSD.new_zeros(ctx.shape, dtype=torch.float32)
        total_VD.index_add_(0, tokens_BS.flatten(), grad_BSD.flatten(0, 1).to(torch.float32))
        return total_VD.to(ctx.dtype), None
