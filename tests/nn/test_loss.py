"""Is the chunked loss the cross-entropy that torch computes from all logits at once, and its gradients too?"""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.harness.memory import Watch
from tests.harness.tolerances import GRADIENT, LOSS, relative_difference
from triax.nn import loss as loss_room
from triax.nn.loss import IGNORE_INDEX, cross_entropy_sum

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def example(tokens: int, width: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head and labels of which about a third do not count; logits of a few units."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    head = (torch.randn(vocab, width, generator=random, dtype=torch.float64) * width**-0.5 * 3).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=random)
    labels[torch.rand(tokens, generator=random) < 0.3] = IGNORE_INDEX
    return hidden, head.requires_grad_(), labels


def in_chunks_of(numbers: int) -> "patch.dict[str, int]":
    """Make ``numbers`` logits at a time."""
    return patch.dict(loss_room._CHUNK_NUMBERS, cpu=numbers)


def by_torch(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return F.cross_entropy(hidden.to(wide) @ head.to(wide).T, labels, ignore_index=IGNORE_INDEX, reduction="sum")


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("rows", [1, 7, 1000], ids=lambda rows: f"{rows} tokens in a chunk")
def test_loss_and_gradients_equal_those_of_torch(precision: str, rows: int) -> None:
    hidden, head, labels = example(45, 16, 61, DTYPES[precision])
    with in_chunks_of(rows * 61):
        loss = cross_entropy_sum(hidden, head, labels)
    expected = by_torch(hidden, head, labels)
    assert loss.dtype == DTYPES[precision]
    assert abs(loss - expected) <= LOSS[precision] * expected
    gradients = torch.autograd.grad(loss, (hidden, head))
    right = torch.autograd.grad(expected, (hidden, head))
    assert max(map(relative_difference, gradients, right)) <= GRADIENT[precision]


def test_bf16_is_nearer_to_the_truth_than_torch() -> None:
    """Logits are never rounded to bf16, so that the loss is as exact as in fp32; gradients are, once."""
    hidden, head, labels = example(45, 16, 61, torch.bfloat16)
    exact_hidden, exact_head = (tensor.detach().double().requires_grad_() for tensor in (hidden, head))
    loss, truth = cross_entropy_sum(hidden, head, labels), by_torch(exact_hidden, exact_head, labels)
    plain = F.cross_entropy((hidden @ head.T).float(), labels, ignore_index=IGNORE_INDEX, reduction="sum")
    assert loss.dtype == torch.float32
    assert abs(loss - truth) <= LOSS["fp32"] * truth < abs(plain - truth)
    exact = torch.autograd.grad(truth, (exact_hidden, exact_head))
    for ours, theirs, right in zip(
        torch.autograd.grad(loss, (hidden, head)), torch.autograd.grad(plain, (hidden, head)), exact, strict=True
    ):
        assert ours.dtype == torch.bfloat16
        assert (ours - right).norm() < (theirs - right).norm()
        assert (ours - right).norm() <= GRADIENT["bf16"] * right.norm()


@pytest.mark.parametrize("precision", DTYPES)
def test_a_scaled_loss_has_scaled_gradients(precision: str) -> None:
    hidden, head, labels = example(45, 16, 61, DTYPES[precision])
    loss = cross_entropy_sum(hidden, head, labels)
    plain = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    scaled = torch.autograd.grad(loss * 0.37, hidden)[0]
    assert torch.equal(scaled, (plain.to(loss.dtype) * loss.new_tensor(0.37)).to(hidden.dtype))


@given(
    tokens=st.integers(0, 12),
    vocab=st.integers(2, 9),
    numbers=st.integers(1, 60),
    seed=st.integers(0, 1 << 16),
)
def test_no_shape_and_no_chunk_is_special(tokens: int, vocab: int, numbers: int, seed: int) -> None:
    hidden, head, labels = example(tokens, 4, vocab, torch.float64, seed)
    with in_chunks_of(numbers):
        loss = cross_entropy_sum(hidden, head, labels)
    expected = by_torch(hidden, head, labels)
    assert abs(loss - expected) <= 1e-9 * max(1.0, expected.item())
    for gradient, right in zip(
        torch.autograd.grad(loss, (hidden, head)), torch.autograd.grad(expected, (hidden, head)), strict=True
    ):
        torch.testing.assert_close(gradient, right, rtol=1e-9, atol=1e-9)


def test_gradients_equal_differences() -> None:
    hidden, head, labels = example(9, 5, 11, torch.float64)
    with in_chunks_of(3 * 11):
        assert torch.autograd.gradcheck(lambda h, w: cross_entropy_sum(h, w, labels), (hidden, head))


def test_tokens_that_do_not_count_add_nothing() -> None:
    hidden, head, labels = example(8, 4, 6, torch.float32)
    labels.fill_(IGNORE_INDEX)
    loss = cross_entropy_sum(hidden, head, labels)
    assert loss == 0
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss, (hidden, head)))


def test_without_gradients_the_loss_has_the_same_bits() -> None:
    hidden, head, labels = example(20, 8, 17, torch.bfloat16)
    with_gradients = cross_entropy_sum(hidden, head, labels)
    with torch.no_grad():
        assert torch.equal(cross_entropy_sum(hidden, head, labels), with_gradients)


def test_a_frozen_head_costs_no_gradient() -> None:
    hidden, head, labels = example(32, 8, 256, torch.float32)
    head.requires_grad_(False)
    with Watch() as watch:
        loss = cross_entropy_sum(hidden, head, labels)
        assert watch.live_bytes() == hidden.nbytes + loss.nbytes
    loss.backward()
    assert head.grad is None
    assert hidden.grad is not None


def test_no_logits_outlive_the_forward() -> None:
    hidden, head, labels = example(64, 8, 256, torch.float32)
    with Watch() as watch:
        loss = cross_entropy_sum(hidden, head, labels)
        assert watch.live_bytes() == hidden.nbytes + head.nbytes + loss.nbytes


def test_a_graph_that_is_kept_gives_the_same_gradient_again() -> None:
    hidden, head, labels = example(10, 4, 7, torch.float64)
    loss = cross_entropy_sum(hidden, head, labels)
    first = torch.autograd.grad(loss, (hidden, head), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, head))
    assert all(map(torch.equal, first, again))
