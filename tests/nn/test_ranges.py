"""Is attention to a range of keys the softmax over them, and are parts of it worth as much as the whole?"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from triax.nn import ranges
from triax.nn.ranges import attend_part, attend_ranges, merge_parts, ranges_backward

B, N, K, H = 2, 6, 2, 5
SCALE = 0.7


def tensors(queries: int, keys: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = ((B, N, queries, H), (B, K, keys, H), (B, K, keys, H))
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=draw).to(dtype) for shape in shapes)
    return q, k, v


def plain(q: Tensor, k: Tensor, v: Tensor, first: Tensor, stop: Tensor) -> Tensor:
    """The same with a square of scores; every query must see a key."""
    places = torch.arange(k.shape[2])
    seen = (places >= first.unsqueeze(-1)) & (places < stop.unsqueeze(-1))
    k, v = (x.repeat_interleave(N // K, dim=1) for x in (k, v))
    scores = (q @ k.mT * SCALE).masked_fill(~seen.unsqueeze(1), -torch.inf)
    return scores.softmax(dim=-1) @ v


@st.composite
def cases(draw: Any) -> tuple[int, int, Tensor, Tensor]:
    """Numbers of queries and keys, and a range of at least one key for each query."""
    queries, keys = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    first, stop = [], []
    for _ in range(B * queries):
        first.append(draw(st.integers(0, keys - 1)))
        stop.append(draw(st.integers(first[-1] + 1, keys)))
    return queries, keys, torch.tensor(first).view(B, queries), torch.tensor(stop).view(B, queries)


@given(cases(), st.integers(0, 9), st.sampled_from([1, 3, 128]))
def test_parts_of_the_keys_come_to_the_softmax_over_all(
    case: tuple[int, int, Tensor, Tensor], cut: int, rows: int
) -> None:
    """Also where a query sees none of the keys of a part; with any number of rows in a tile."""
    queries, keys, first, stop = case
    whole = [x.requires_grad_() for x in tensors(queries, keys, seed=cut)]
    expected = plain(*whole, first, stop)
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((expected * grad).sum(), whole)
    q, k, v = (x.detach() for x in whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "_MOST_ROWS", rows)
        out, log_sums = attend_ranges(q, k, v, first, stop, SCALE)
        torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-13)
        delta = (out * grad).sum(dim=-1)
        parts = [slice(0, min(cut, keys)), slice(min(cut, keys), keys)]
        grad_q, of_parts, merged = torch.zeros_like(q), [], (torch.zeros_like(out), torch.full_like(log_sums, -1e300))
        for part in (part for part in parts if part.start < part.stop):
            here = [place.clamp(part.start, part.stop) - part.start for place in (first, stop)]
            merged = merge_parts(*merged, *attend_part(q, k[:, :, part], v[:, :, part], *here, SCALE))
            of_q, *of_keys = ranges_backward(grad, q, k[:, :, part], v[:, :, part], log_sums, delta, *here, SCALE)
            grad_q += of_q
            of_parts.append(of_keys)
    torch.testing.assert_close(merged, (out, log_sums), rtol=1e-12, atol=1e-13)
    found = (grad_q, *(torch.cat(of_kind, dim=2) for of_kind in zip(*of_parts, strict=True)))
    torch.testing.assert_close(found, gradients, rtol=1e-10, atol=1e-12)


def test_who_sees_nothing_adds_nothing() -> None:
    q, k, v = tensors(3, 4, seed=0)
    first, stop = torch.tensor([[0, 2, 4]]).expand(B, 3), torch.tensor([[4, 2, 1]]).expand(B, 3)
    out, log_sums = attend_ranges(q, k, v, first, stop, SCALE)
    assert out[:, :, 1:].count_nonzero() == 0
    assert bool((log_sums[:, :, 1:] == -torch.inf).all())
    log_sums, delta = log_sums.clamp(min=0), torch.zeros_like(log_sums)  # as they are over all keys
    grad_q, _, _ = ranges_backward(torch.ones_like(out), q, k, v, log_sums, delta, first, stop, SCALE)
    assert grad_q[:, :, 1:].count_nonzero() == 0
    assert grad_q.isfinite().all()


def test_bf16_is_summed_in_fp32() -> None:
    q, k, v = tensors(8, 300, seed=3, dtype=torch.bfloat16)
    first, stop = torch.zeros(B, 8, dtype=torch.int64), torch.full((B, 8), 300)
    out, log_sums = attend_ranges(q, k, v, first, stop, SCALE)
    assert out.dtype == log_sums.dtype == torch.float32
    exact = plain(q.double(), k.double(), v.double(), first, stop)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)


def test_a_tile_is_no_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles have no more rows than they may have numbers, and never more than a fixed count."""
    seen: list[int] = []
    product = ranges._product

    def measured(a: Tensor, b: Tensor) -> Tensor:
        result = product(a, b)
        seen.append(result.numel())
        return result

    monkeypatch.setattr(ranges, "_product", measured)
    monkeypatch.setattr(ranges, "_TILE_NUMBERS", {"cpu": 5000})
    q, k, v = tensors(200, 200, seed=4)
    causal = torch.arange(200).expand(B, 200)
    ranges._attended(q, k, v, torch.zeros_like(causal), causal + 1, SCALE)
    assert max(seen) <= 5000
    monkeypatch.setattr(ranges, "_TILE_NUMBERS", {"cpu": 1 << 30})
    seen.clear()
    ranges._attended(q, k, v, torch.zeros_like(causal), causal + 1, SCALE)
    assert max(seen) <= B * N * 128 * 200
