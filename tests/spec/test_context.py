"""Does every position have one rank, and every rank as much attention to do as any other?"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.spec.context import positions_of


@given(cp=st.integers(1, 16), size=st.integers(1, 20))
def test_parts_make_up_a_sequence_and_are_equally_dear(cp: int, size: int) -> None:
    seq_len = 2 * cp * size
    parts = [[position for chunk in positions_of(seq_len, cp, index) for position in chunk] for index in range(cp)]
    assert sorted(position for part in parts for position in part) == list(range(seq_len))
    assert all(part == sorted(part) for part in parts)
    assert len({sum(position + 1 for position in part) for part in parts}) == 1


def test_a_sequence_that_does_not_divide() -> None:
    assert positions_of(5, 1, 0) == [range(5)]
    assert positions_of(8, 2, 1) == [range(2, 4), range(4, 6)]
    with pytest.raises(ValueError, match="10 positions do not make 4 equal chunks"):
        positions_of(10, 2, 0)
