"""Is this computed on a card? Kernels, sizes of chunks and the best collective differ; the mathematics does not."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from torch import Tensor

_STANDS_FOR_CARD: Final = ContextVar("whether tensors on the CPU stand for such on a card", default=False)


def is_on_card(tensor: Tensor) -> bool:
    """Return whether ``tensor`` lies on a card, or stands for one that does."""
    return tensor.is_cuda or _STANDS_FOR_CARD.get()


@contextmanager
def standing_for_cards(is_card: bool = True) -> Iterator[None]:
    """Compute inside the ``with`` as on cards, of which torch may know nothing here; with fake tensors alone."""
    token = _STANDS_FOR_CARD.set(is_card)
    try:
        yield
    finally:
        _STANDS_FOR_CARD.reset(token)
