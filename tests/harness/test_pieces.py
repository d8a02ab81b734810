"""Do pieces of tensors only come together where all are there and replicas are equal?"""

import pytest
import torch
from torch import Tensor

from tests.harness.pieces import Piece, Pieces, put_together

WHOLE = torch.arange(12.0).reshape(4, 3)


def piece(start: int, stop: int, values: Tensor | None = None) -> Pieces:
    """Rows ``start:stop`` of the whole, as one rank holds them."""
    return {"w": [Piece((4, 3), ((start, stop), (0, 3)), WHOLE[start:stop] if values is None else values)]}


def test_pieces_make_up_the_whole_also_where_they_overlap() -> None:
    assert torch.equal(put_together([piece(0, 3), piece(2, 4), piece(0, 3)])["w"], WHOLE)


def test_a_missing_row_is_named() -> None:
    with pytest.raises(AssertionError, match=r"no rank holds some elements of \['w'\]"):
        put_together([piece(0, 2), piece(3, 4)])


def test_a_replica_that_differs_in_a_bit_is_named() -> None:
    other = WHOLE[2:4].clone()
    other[0, 0] = other[0, 0].nextafter(torch.tensor(9.0))
    with pytest.raises(AssertionError, match="replicas of w differ"):
        put_together([piece(0, 3), piece(2, 4, other)])
