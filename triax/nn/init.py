"""Which bits does a weight start with? A function of (seed, name, position) alone, so every layout starts equal.

A weight is drawn in blocks of rows, each from a generator seeded by (seed, name, block). A rank that holds some rows
draws only the blocks they lie in: a 70B model on a thousand ranks costs each rank its share, not the whole.
"""

import hashlib
import math

import torch

from triax.spec.model import ModelSpec
from triax.spec.weights import Weight

_ROWS_PER_BLOCK = 256


def initial_rows(weight: Weight, model: ModelSpec, seed: int, start: int, stop: int) -> torch.Tensor:
    """Return rows ``start:stop`` of the whole initial ``weight``, in fp32 on the CPU.

    Norms start as ones (zeros where they are stored as the difference from one), biases as zeros. Matrices are normal
    with ``initial_std``. The bits do not depend on which rows are asked together.
    """
    if len(weight.shape) == 1:
        is_one = weight.role == "norm" and not model.norm_is_offset
        return torch.full((stop - start,), 1.0 if is_one else 0.0)
    rest = weight.shape[1:]
    rows = torch.empty(stop - start, *rest)
    std = initial_std(weight, model)
    for block in range(start // _ROWS_PER_BLOCK, math.ceil(stop / _ROWS_PER_BLOCK)):
        first = block * _ROWS_PER_BLOCK
        last = min(first + _ROWS_PER_BLOCK, weight.shape[0])
        drawn = torch.empty(last - first, *rest).normal_(0.0, std, generator=_generator(seed, weight.name, block))
        low, high = max(first, start), min(last, stop)
        rows[low - start : high - start] = drawn[low - first : high - first]
    return rows


def initial_std(weight: Weight, model: ModelSpec) -> float:
    """Return the standard deviation that ``weight`` starts with.

    Matrices that write to the residual stream are scaled by 1/sqrt(2 L), so that the sum over L layers keeps its size
    (Radford et al. 2019, GPT-2, section 2.3). Embedding and head are held to 1/(2 sqrt(D)) at most: the logits of a
    normalised hidden state then have a variance of at most 1/4, and the first loss is near ln(V) at any width.
    """
    if weight.role in ("attention_out", "mlp_down"):
        return model.initializer_range / math.sqrt(2 * model.num_hidden_layers)
    if weight.role in ("embedding", "head"):
        return min(model.initializer_range, 0.5 / math.sqrt(model.hidden_size))
    return model.initializer_range


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
