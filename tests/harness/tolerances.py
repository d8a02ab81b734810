"""How equal is equal? One table, cited everywhere, never loosened to pass.

fp64 is the main proof: nothing casts below the compute dtype, so only the order of sums may differ. In fp32 AdamW's
normalisation amplifies the last bit where a gradient is near zero, hence its own line.
"""

from typing import Final

import torch
from torch import Tensor

GRADIENT: Final = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 3e-3}
"""Largest difference of a gradient, relative to its own largest number."""

WEIGHT: Final = {
    ("fp64", "adamw"): 1e-9, ("fp64", "sgd"): 1e-9,
    ("fp32", "adamw"): 5e-5, ("fp32", "sgd"): 1e-5,
    ("bf16", "adamw"): 3e-3, ("bf16", "sgd"): 3e-3,
}  # fmt: skip
"""Largest difference of a weight after up to 20 steps, relative to its own largest number."""

LOSS: Final = {"fp64": 1e-9, "fp32": 2e-6, "bf16": 3e-3}
"""Difference of a loss over up to 20 steps, times max(1, loss)."""


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return max|actual - expected| / max|expected|; infinite where shapes or finiteness differ."""
    actual, expected = actual.detach(), expected.detach()
    if actual.shape != expected.shape or not bool(actual.isfinite().all()):
        return float("inf")
    scale = float(expected.abs().max())
    difference = float((actual.to(torch.float64) - expected.to(torch.float64)).abs().max())
    return difference if scale == 0 else difference / scale


def assert_losses_equal(actual: list[float], expected: list[float], precision: str) -> None:
    """Fail with the first step whose loss differs by more than the table allows."""
    assert len(actual) == len(expected)
    for step, (one, other) in enumerate(zip(actual, expected, strict=True)):
        allowed = LOSS[precision] * max(1.0, abs(other))
        assert abs(one - other) <= allowed, (
            f"step {step}: {one} against {other}, {abs(one - other):.2e} > {allowed:.2e}"
        )


def assert_tensors_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Fail with every tensor that differs by more than ``tolerance``, and by how much."""
    assert actual.keys() == expected.keys()
    off = {name: relative_difference(actual[name], expected[name]) for name in expected}
    wrong = {name: f"{value:.2e}" for name, value in off.items() if not value <= tolerance}
    assert not wrong, f"relative differences above {tolerance}: {wrong}"


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Fail with the names of the tensors that differ in any bit."""
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
