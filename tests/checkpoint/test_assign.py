"""Is every block written exactly once, by a rank that holds it, and evenly; and are contradictions named?"""

import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.checkpoint.assign import Holding, Share, assign
from triax.checkpoint.format import boxes
from triax.checkpoint.state import Box
from triax.errors import BadInput


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and its blocks by random cuts of each dim."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    cuts = [sorted({0, size, *draw(st.sets(st.integers(0, size), max_size=3))}) for size in shape]
    return shape, list(product(*(list(pairwise(of_dim)) for of_dim in cuts)))


@given(tensors=st.lists(grids(), max_size=4), world=st.integers(1, 5), data=st.data())
def test_blocks_cover_each_tensor_once_and_lie_with_their_writers(
    tensors: list[tuple[tuple[int, ...], list[Box]]], world: int, data: st.DataObject
) -> None:
    holdings: list[dict[str, Holding]] = [{} for _ in range(world)]
    for index, (shape, blocks) in enumerate(tensors):
        holders = [data.draw(st.sets(st.integers(0, world - 1), min_size=1)) for _ in blocks]
        for rank in range(world):
            mine = tuple(block for block, of_block in zip(blocks, holders, strict=True) if rank in of_block)
            if mine:
                holdings[rank][f"weight.{index}"] = Holding("F32", shape, mine)
    shares = assign(holdings)
    assert list(shares) == sorted({name for of_rank in holdings for name in of_rank})
    for name, share in shares.items():
        written = np.zeros(share.shape, dtype=int)
        for box, writer in zip(boxes(share.cuts), share.writers, strict=True):
            written[tuple(slice(start, stop) for start, stop in box)] += 1
            assert any(lies_in(box, held) for held in holdings[writer][name].boxes)
        assert (written == 1).all()
    assert shares == assign(holdings)


def lies_in(inner: Box, outer: Box) -> bool:
    return all(low <= start and stop <= high for (start, stop), (low, high) in zip(inner, outer, strict=True))


def bytes_by_rank(shares: dict[str, Share], world: int) -> list[int]:
    load = [0] * world
    for share in shares.values():
        for box, writer in zip(boxes(share.cuts), share.writers, strict=True):
            load[writer] += 4 * math.prod(stop - start for start, stop in box)
    return load


def test_replicas_share_the_writing_evenly() -> None:
    """One large weight and many small ones, all replicated: none of four ranks writes 5 % more than its quarter."""
    shapes = {"embed": (32_000, 512)} | {f"layer.{index}": (512, 512 + index) for index in range(24)}
    everywhere = {name: Holding("F32", shape, (tuple((0, size) for size in shape),)) for name, shape in shapes.items()}
    load = bytes_by_rank(assign([everywhere] * 4), 4)
    assert sum(load) == 4 * sum(math.prod(shape) for shape in shapes.values())
    assert max(load) <= 1.05 * sum(load) / 4


def test_hybrid_shards_are_shared_by_their_replicas() -> None:
    def half(index: int) -> dict[str, Holding]:
        return {"weight": Holding("F32", (4096, 1024), (((2048 * index, 2048 * (index + 1)), (0, 1024)),))}

    load = bytes_by_rank(assign([half(0), half(1), half(0), half(1)]), 4)
    assert load == [4 * 1024 * 1024] * 4


def test_a_tensor_without_elements_has_no_blocks() -> None:
    share = assign([{"weight": Holding("F32", (0, 3), ())}])["weight"]
    assert (share.cuts, share.writers) == (((0,), (0, 3)), ())


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (Holding("F32", (4,), (((0, 2),),)), Holding("F32", (5,), (((2, 4),),)), "different tensors by 'w'"),
        (Holding("F32", (4,), (((0, 2),),)), Holding("F64", (4,), (((2, 4),),)), "different tensors by 'w'"),
        (Holding("F32", (4,), (((0, 2),),)), Holding("F32", (4,), (((3, 4),),)), "once and whole"),
        (Holding("F32", (4,), (((0, 3),),)), Holding("F32", (4,), (((2, 4),),)), "once and whole"),
        (Holding("F32", (4,), ()), Holding("F32", (4,), ()), "they hold nothing"),
        (
            Holding("F32", (2, 2), (((0, 1), (0, 1)),)),
            Holding("F32", (2, 2), (((1, 2), (1, 2)),)),
            "once and whole",
        ),
        (
            Holding("F32", (2, 2), (((0, 1), (0, 1)), ((1, 2), (0, 2)))),
            Holding("F32", (2, 2), (((0, 1), (1, 2)),)),
            "once and whole",
        ),
    ],
)
def test_contradictions_are_named(first: Holding, second: Holding, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        assign([{"w": first}, {"w": second}])
