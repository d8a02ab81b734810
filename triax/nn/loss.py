"""How wrong are the predictions: the sum of cross-entropies over the tokens that count, never a mean of means.

The logits of all tokens at once would be the largest tensor of a step (T x V numbers, T tokens, V vocabulary). They are
made for a chunk of tokens at a time and turned into gradients at once, so that no logits outlive their chunk.
"""

from typing import Any, Final

import torch
from torch import Tensor

from triax.nn.card import is_on_card

IGNORE_INDEX: Final = -100
"""The label of a token that does not count."""

_CHUNK_NUMBERS: Final = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Logits in one chunk (*assumed*). On a CPU 16 MiB in fp32, near the size of its last cache. On a card 512 MiB: a
thousand tokens against a vocabulary of 128k, so that reading the head costs less than multiplying by it."""


class Vocabulary:
    """Which tokens the rows of a head stand for: all of them, on one device."""

    start = 0
    """The token of the first row."""

    def head(self, weight_VD: Tensor) -> Tensor:
        """Return the rows that are here."""
        return weight_VD

    def most_rows(self, head_VD: Tensor) -> int:
        """Return the number of rows of the owner with the most, so that all owners cut tokens into equal chunks."""
        return head_VD.shape[0]

    def maximum(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over all rows' owners."""
        return values

    def total(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over all rows' owners."""
        return values

    def gather(self, logits_BSV: Tensor) -> Tensor:
        """Return the logits of all tokens from those of the rows that are here."""
        return logits_BSV


WHOLE_VOCABULARY: Final = Vocabulary()
"""All of it on one device; it holds no state."""


def cross_entropy_sum(
    hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, vocabulary: Vocabulary = WHOLE_VOCABULARY
) -> Tensor:
    """Return the summed cross-entropy (a scalar in at least fp32) of ``hidden @ head.T`` against ``labels``.

    ``head`` holds the rows of ``vocabulary`` that are here; the loss is over all of it, and the gradient of ``hidden``
    comes from the rows here alone.

    Labels of ``IGNORE_INDEX`` add nothing. Logits and their statistics are at least fp32, fp64 where ``hidden`` is: the
    logits of bf16 states are summed and kept in fp32, never rounded to bf16.
    """
    if torch.is_grad_enabled() and (hidden_TD.requires_grad or head_VD.requires_grad):
        loss: Tensor = _ChunkedCrossEntropy.apply(hidden_TD, head_VD, labels_T, vocabulary)  # type: ignore[no-untyped-call]
        return loss
    return _loss_and_gradients(hidden_TD, head_VD, labels_T, vocabulary, None, None)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Makes both gradients in the forward, where the logits are, and only scales them in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, vocabulary: Vocabulary) -> Tensor:
        needs_hidden, needs_head, _, _ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden_TD) if needs_hidden else None
        grad_head = torch.zeros_like(head_VD, dtype=_wide(head_VD)) if needs_head else None
        loss = _loss_and_gradients(hidden_TD, head_VD, labels_T, vocabulary, grad_hidden, grad_head)
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        scale = grad_outputs[0]
        return _scaled(grad_hidden, scale, None), _scaled(grad_head, scale, ctx.head_dtype), None, None


def _scaled(gradient: Tensor | None, scale: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    if gradient is None:
        return None
    # Into its dtype at once: a copy of the head's gradient in fp32 is gigabytes.
    return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))


def _loss_and_gradients(
    hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, vocabulary: Vocabulary, grad_hidden: Tensor | None,
    grad_head: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the loss. Write the gradient of the hidden states into ``grad_hidden`` and add that of the head to
    ``grad_head``, where they are given."""
    loss = torch.zeros((), dtype=_wide(hidden_TD), device=hidden_TD.device)
    num_rows = head_VD.shape[0]
    rows = max(_CHUNK_NUMBERS["cuda" if is_on_card(hidden_TD) else "cpu"] // vocabulary.most_rows(head_VD), 1)
    for start in range(0, hidden_TD.shape[0], rows):
        chunk = slice(start, start + rows)
        hidden, labels = hidden_TD[chunk], labels_T[chunk]
        counts = labels != IGNORE_INDEX
        places = labels - vocabulary.start
        is_here = counts & (places >= 0) & (places < num_rows)
        targets = torch.where(is_here, places, 0).unsqueeze(1)
        logits = _wide_matmul(hidden, head_VD.T)
        highest = vocabulary.maximum(logits.amax(dim=1, keepdim=True) if num_rows else _lowest(logits))
        wanted = (logits.gather(1, targets) - highest) * is_here.unsqueeze(1) if num_rows else torch.zeros_like(highest)
        powers = logits.sub_(highest).exp_()
        sums, wanted = vocabulary.total(torch.stack((powers.sum(dim=1, keepdim=True), wanted)))
        loss += ((sums.log() - wanted).squeeze(1) * counts).sum()
        if grad_hidden is None and grad_head is None:
            continue
        grad_logits = powers.div_(sums)
        if num_rows:
            grad_logits.scatter_add_(1, targets, -is_here.unsqueeze(1).to(grad_logits.dtype))
        grad_logits *= counts.unsqueeze(1)
        narrow = grad_logits.to(hidden.dtype)
        if grad_hidden is not None:
            grad_hidden[chunk] = narrow @ head_VD
        if grad_head is not None:
            grad_head += _wide_matmul(narrow.T, hidden)
    return loss


def _lowest(logits: Tensor) -> Tensor:
    return logits.new_full((logits.shape[0], 1), torch.finfo(logits.dtype).min)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in at least fp32 without rounding to the dtype of the factors on the way."""
    if is_on_card(a) and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)  # as fast as without, and exists on CUDA alone
    return a.to(_wide(a)) @ b.to(_wide(b))
