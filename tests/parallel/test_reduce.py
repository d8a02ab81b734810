"""Is a gradient that is too long scaled to its limit, and any other left alone?"""

import pytest
import torch

from triax.parallel.reduce import clip


def gradients() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, 4, generator=random),
        torch.randn(5, generator=random, dtype=torch.float64),
        torch.empty(0, 4),  # a rank may hold no row of a weight
    ]


def norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt()


def test_a_long_gradient_gets_the_longest_norm_allowed_and_keeps_its_direction() -> None:
    clipped, original = gradients(), gradients()
    clip(clipped, norm(original), 0.25)
    assert norm(clipped).item() == pytest.approx(0.25, rel=1e-5)
    factor = 0.25 / norm(original)
    for one, other in zip(clipped, original, strict=True):
        torch.testing.assert_close(one.double(), other.double() * factor, rtol=1e-5, atol=0)


def test_a_short_gradient_keeps_its_bits() -> None:
    clipped, original = gradients(), gradients()
    clip(clipped, norm(original), 100.0)
    assert all(map(torch.equal, clipped, original))
