"""Does attention look back, only back, and never into another document?"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from triax.nn.attention import Attention, attend
from triax.nn.rope import Rotation
from triax.spec.model import ModelSpec

B, S = 2, 12
MODEL = ModelSpec(
    hidden_size=20, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
    vocab_size=8,
)  # fmt: skip


def attention(dtype: torch.dtype = torch.float64) -> Attention:
    torch.manual_seed(0)
    return Attention(MODEL, 0).to(dtype)


def rotation(positions: Tensor, dtype: torch.dtype = torch.float64) -> Rotation:
    return Rotation.at(positions, None, MODEL, "global", dtype)


def documents(cuts: set[int], length: int = S) -> tuple[Tensor, Tensor]:
    """Positions (B, S) and bounds, where every sequence is cut at the same places."""
    bounds = [0, *sorted(cuts), length]
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(bounds)]).expand(B, length)
    cu_seqlens = [0, *(row * length + bound for row in range(B) for bound in bounds[1:])]
    return positions, torch.tensor(cu_seqlens, dtype=torch.int32)


@given(cuts=st.sets(st.integers(1, S - 1)))
def test_documents_that_share_a_sequence_are_as_if_alone(cuts: set[int]) -> None:
    layer = attention()
    x = torch.randn(B, S, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    positions, cu_seqlens = documents(cuts)
    packed = layer(x, rotation(positions), cu_seqlens)
    bounds = [0, *sorted(cuts), S]
    alone = torch.cat(
        [
            layer(x[:, start:stop], rotation(torch.arange(stop - start).expand(B, -1)), None)
            for start, stop in pairwise(bounds)
        ],
        dim=1,
    )
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-14)
    weight = torch.linspace(-1, 1, packed.numel(), dtype=torch.float64).view_as(packed)
    wanted = (x, *layer.parameters())
    for gradient, expected in zip(
        torch.autograd.grad((packed * weight).sum(), wanted),
        torch.autograd.grad((alone * weight).sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_token_is_seen_from_before_it_or_from_another_document(dtype: torch.dtype) -> None:
    layer = attention(dtype)
    positions, cu_seqlens = documents({5, 9})
    x = torch.randn(B, S, 20, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = layer(x, rotation(positions, dtype), cu_seqlens)
    x[0, 6] += 1
    changed = (layer(x, rotation(positions, dtype), cu_seqlens) != before).any(dim=2)
    assert changed.nonzero().tolist() == [[0, 6], [0, 7], [0, 8]]


@pytest.mark.parametrize("is_packed", [False, True], ids=["one document", "documents"])
def test_attention_is_the_softmax_of_scores(is_packed: bool) -> None:
    random = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(B, heads, S, 6, dtype=torch.float64, generator=random) for heads in (4, 2, 2))
    _, cu_seqlens = documents({4})
    document = torch.where(torch.arange(S) < 4, 0, 1) if is_packed else torch.zeros(S)
    visible = (document[:, None] == document[None, :]) & torch.ones(S, S).tril().bool()
    k_all, v_all = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = (q @ k_all.transpose(2, 3) / 6**0.5).masked_fill(~visible, -torch.inf)
    expected = scores.softmax(dim=3) @ v_all
    torch.testing.assert_close(attend(q, k, v, cu_seqlens if is_packed else None, None, None), expected)


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation puts out."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return result


@pytest.mark.parametrize("cuts", [None, {100, 101, 230}], ids=["one document", "documents"])
def test_no_square_of_positions_is_ever_made(cuts: set[int] | None) -> None:
    length = 256
    layer = attention(torch.float32)
    positions, cu_seqlens = documents(cuts or set(), length)
    x = torch.randn(B, length, 20, requires_grad=True)
    with Largest() as largest:
        layer(x, rotation(positions, torch.float32), None if cuts is None else cu_seqlens).sum().backward()
    assert 0 < largest.numbers < length * length


def test_scores_depend_on_the_distance_of_two_positions_alone() -> None:
    random = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, 1, 1, 6, dtype=torch.float64, generator=random) for _ in range(2))

    def score(at: int, to: int) -> float:
        turned = [rotation(torch.tensor([[position]])).apply(x) for x, position in ((q, at), (k, to))]
        return float((turned[0] * turned[1]).sum())

    assert score(1007, 1000) == pytest.approx(score(7, 0), rel=1e-9)
    assert score(7, 0) != pytest.approx(score(8, 0), rel=1e-3)


def test_angles_of_late_positions_are_not_rounded_to_bf16() -> None:
    x = torch.ones(1, 1, 2, 6)
    late = torch.tensor([[100_000, 100_001]])
    turned = rotation(late, torch.bfloat16).apply(x.bfloat16())
    exact = rotation(late, torch.float64).apply(x.double())
    assert turned.dtype == torch.bfloat16
    # fp32 holds an angle of 1e5 to within 4e-3, bf16 only to within 256.
    torch.testing.assert_close(turned.double(), exact, rtol=0, atol=2e-2)
