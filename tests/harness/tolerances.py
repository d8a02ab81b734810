"""How does a test fail where two runs are not equal? By the one table of tolerances, which ``triax verify`` has too."""

import torch
from torch import Tensor

from triax.verify.tolerances import GRADIENT, LOSS, WEIGHT, relative_difference

__all__ = ["GRADIENT", "LOSS", "WEIGHT", "assert_losses_equal", "assert_tensors_equal", "relative_difference"]


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
