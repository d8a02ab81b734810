"""Which operations are none? To learn the shape of a result, DTensor runs an operation once more, on whole fakes.

These are no work and no memory of anybody. torch runs them under ``ShardingPropagator._fake_mode_lock``, an attribute
that is there to be set; a contract test holds that it is.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.distributed.tensor._sharding_prop import ShardingPropagator


class Ghosts:
    """Knows whether what runs at the moment is such a shadow."""

    def __init__(self) -> None:
        self._depth = 0

    @property
    def are_about(self) -> bool:
        """Whether the operation that is being dispatched is one of them."""
        return self._depth > 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look out for them inside the ``with``."""
        before: AbstractContextManager[Any] = ShardingPropagator._fake_mode_lock
        ShardingPropagator._fake_mode_lock = _Counted(self, before)  # type: ignore[assignment]
        try:
            yield
        finally:
            ShardingPropagator._fake_mode_lock = before  # type: ignore[assignment]

    def come(self) -> None:
        """Say that such operations begin."""
        self._depth += 1

    def go(self) -> None:
        """Say that they have ended."""
        self._depth -= 1


class _Counted(AbstractContextManager[None]):
    """A lock that counts who holds it."""

    def __init__(self, ghosts: Ghosts, inner: AbstractContextManager[Any]) -> None:
        self._ghosts, self._inner = ghosts, inner

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._ghosts.come()

    def __exit__(self, *error: Any) -> None:
        self._ghosts.go()
        self._inner.__exit__(*error)
