"""How wrong are the predictions: the sum of cross-entropies over the tokens that count, never a mean of means.

The logits of all tokens at once would be the largest tensor of a step (T x V numbers, T tokens, V vocabulary). They are
made for a chunk of tokens at a time and turned into gradients at once, so that no logits outlive their chunk.
"""

from typing import Any

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""The label of a token that does not count."""

_CHUNK_NUMBERS = 1 << 22
"""Logits in one chunk (*assumed*: 16 MiB in fp32, near the size of a CPU's last cache, and large enough for a GPU)."""


def cross_entropy_sum(hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor) -> Tensor:
    """Return the summed cross-entropy (a scalar in at least fp32) of ``hidden @ head.T`` against ``labels``.

    Labels of ``IGNORE_INDEX`` add nothing. Logits and their statistics are at least fp32, fp64 where ``hidden`` is.
    """
    if torch.is_grad_enabled() and (hidden_TD.requires_grad or head_VD.requires_grad):
        loss: Tensor = _ChunkedCrossEntropy.apply(hidden_TD, head_VD, labels_T)  # type: ignore[no-untyped-call]
        return loss
    loss, _, _ = _forward(hidden_TD, head_VD, labels_T, with_gradients=False)
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Makes both gradients in the forward, where the logits are, and only scales them in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor) -> Tensor:
        loss, grad_hidden, grad_head = _forward(hidden_TD, head_VD, labels_T, with_gradients=True)
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        scale = grad_outputs[0]
        return grad_hidden * scale, (grad_head * scale).to(ctx.head_dtype), None


def _forward(
    hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, *, with_gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(hidden_TD.dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=hidden_TD.device)
    grad_hidden = torch.empty_like(hidden_TD) if with_gradients else hidden_TD
    grad_head = torch.zeros_like(head_VD, dtype=wide) if with_gradients else head_VD
    rows = max(_CHUNK_NUMBERS // head_VD.shape[0], 1)
    for start in range(0, hidden_TD.shape[0], rows):
        chunk = slice(start, start + rows)
        hidden, labels = hidden_TD[chunk], labels_T[chunk]
        counts = labels != IGNORE_INDEX
        targets = labels.clamp(min=0).unsqueeze(1)
        logits = (hidden @ head_VD.T).to(wide)
        statistic = logits.logsumexp(dim=1, keepdim=True)
        loss += ((statistic - logits.gather(1, targets)).squeeze(1) * counts).sum()
        if with_gradients:
            grad_logits = logits.sub_(statistic).exp_()
            grad_logits.scatter_add_(1, targets, torch.full_like(targets, -1, dtype=wide))
            grad_logits *= counts.unsqueeze(1)
            narrow = grad_logits.to(hidden.dtype)
            grad_hidden[chunk] = narrow @ head_VD
            grad_head += narrow.T @ hidden
    return loss, grad_hidden, grad_head
