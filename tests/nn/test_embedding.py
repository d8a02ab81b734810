"""Is the gradient of an embedding the sum over all places of its token, whatever the dtype and the microbatch?"""

import pytest
import torch

from triax.nn.embedding import Embedding


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_token_that_stands_4000_times_gets_the_sum_of_4000_gradients(dtype: torch.dtype) -> None:
    embedding = Embedding(4, 8).to(dtype)
    embedding(torch.ones(2, 2000, dtype=torch.long)).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.dtype == dtype
    assert embedding.weight.grad.tolist() == [[0.0] * 8, [4000.0] * 8, [0.0] * 8, [0.0] * 8]


def test_in_bf16_the_cut_of_a_batch_changes_no_more_than_rounding() -> None:
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 5, (64, 128), generator=chance)
    weights = torch.randn(64, 128, 16, generator=chance).to(torch.bfloat16) + 1
    gradients = []
    for parts in (1, 64):
        embedding = Embedding(5, 16)
        rows = embedding.weight.detach().to(torch.bfloat16).requires_grad_()
        total = torch.zeros(5, 16)
        for some, those in zip(tokens.chunk(parts), weights.chunk(parts), strict=True):
            found = torch.func.functional_call(embedding, {"weight": rows}, some)
            (gradient,) = torch.autograd.grad((found * those).sum(), rows)
            total += gradient
        gradients.append(total)
    one, many = gradients
    assert float((one - many).abs().max() / one.abs().max()) < 3e-3
