"""Which tensors does an operation take and give? Asked of every one of them, and so without ceremony."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among ``values`` and in lists and tuples of them, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def has_memory(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has memory, or stands in for one that has."""
    return isinstance(tensor, FakeTensor) or not tensor.is_meta  # to ask a fake is an operation of its own
