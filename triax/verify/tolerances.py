"""How equal is equal? One table, cited everywhere, never loosened to pass.

fp64 is the main proof: nothing casts below the compute dtype, so only the order of sums may differ. In fp32 AdamW's
normalisation amplifies the last bit where a gradient is near zero, hence its own line.
"""

from typing import Final

import torch
from torch import Tensor

GRADIENT: Final = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 3e-3}
"""Largest difference of a gradient, relative to its own largest number."""

OUTPUT: Final = GRADIENT
"""Largest difference of what a module gives in the forward, relative to its own largest number."""

WEIGHT: Final = {
    ("fp64", "adamw"): 1e-9, ("fp64", "sgd"): 1e-9,
    ("fp32", "adamw"): 5e-5, ("fp32", "sgd"): 1e-5,
    ("bf16", "adamw"): 3e-3, ("bf16", "sgd"): 3e-3,
}  # fmt: skip
"""Largest difference of a weight after up to 20 steps, relative to its own largest number."""

LOSS: Final = {"fp64": 1e-9, "fp32": 2e-6, "bf16": 3e-3}
"""Difference of a loss or of a norm over up to 20 steps, times max(1, loss)."""


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return max|actual - expected| / max|expected|; infinite where shapes or finiteness differ."""
    actual, expected = actual.detach(), expected.detach()
    if actual.shape != expected.shape or not bool(actual.isfinite().all()):
        return float("inf")
    if not expected.numel():
        return 0.0
    scale = float(expected.abs().max())
    difference = float((actual.to(torch.float64) - expected.to(torch.float64)).abs().max())
    return difference if scale == 0 else difference / scale
