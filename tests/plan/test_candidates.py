"""Do arrays of layouts say the same as the layouts?"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.plan.candidates import MLP, ORDERS, Candidates
from triax.spec.layout import AXES, Layout

DEGREES = st.sampled_from([1, 2, 3, 4])
LAYOUTS = st.builds(
    Layout,
    pp=DEGREES,
    dp_replicate=DEGREES,
    dp_shard=DEGREES,
    cp=DEGREES,
    tp=DEGREES,
    zero=st.sampled_from([1, 2, 3]),
    schedule=st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B"]),
    stages_per_rank=DEGREES,
    sequences_per_microbatch=DEGREES,
    microbatches=DEGREES,
    recompute=st.sampled_from(["none", "selective", "full"]),
    stage_cuts=st.sampled_from([None, (2, 1), (1, 2)]),
    order=st.sampled_from(ORDERS),
)


@given(st.lists(LAYOUTS, min_size=1, max_size=5))
def test_layouts_come_back_as_they_were(layouts: list[Layout]) -> None:
    candidates = Candidates.from_layouts(layouts)
    assert [candidates.layout(index) for index in range(len(candidates))] == layouts
    assert list(candidates.world_size) == [layout.world_size for layout in layouts]


@given(LAYOUTS, st.sampled_from(AXES))
def test_strides_are_the_rank_grids(layout: Layout, axis: str) -> None:
    peers = layout.peers(0, axis)
    if len(peers) > 1:
        assert Candidates.from_layouts([layout]).stride(axis)[0] == peers[1] - peers[0]


def test_columns_broadcast_and_are_taken_by_mask_and_by_index() -> None:
    candidates = Candidates.of(tp=[1, 2, 4], dp_shard=8)
    assert list(candidates.world_size) == [8, 16, 32]
    assert list(candidates.take(candidates.tp > 1).tp) == [2, 4]
    assert list(candidates.take([2, 0]).tp) == [4, 1]
    with pytest.raises(TypeError, match="no column"):
        Candidates.of(tensor=2)


def test_what_a_layout_cannot_say_is_an_error() -> None:
    with pytest.raises(ValueError, match="no word for"):
        Candidates.of(recompute=MLP).layout(0)
    with pytest.raises(ValueError, match="etp"):
        Candidates.of(etp=2).layout(0)
    assert Candidates.of(3).pp.dtype == np.int64
