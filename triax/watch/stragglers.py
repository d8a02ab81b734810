"""Which rank is slower than those that do the same, from how long each was busy in each step?

All ranks of a step take equally long, since they wait for the slowest; what differs is how long each is *busy*. The
steps of a rank are compared with those of its equals, ranks of the same pipeline rank that hold the same experts: the
lower median of them counts. Other work on a server makes single steps longer, so a rank is named only where its typical
step is longer by more than the limit, and by more than chance would make it.

A pipeline rank without an equal is compared with itself in its best window so far, and that with how the other such
ranks changed: one that is slow from its first step on is not found.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

WINDOWS: Final = (30, 48)
"""Steps that a verdict looks at (*assumed*): what is clear is found in the shorter window, what is not in the longer,
and both within 50 steps."""

_CERTAIN: Final = 5.5
"""How many standard errors a difference must have (*assumed*); not fewer, since the error itself is estimated from one
window, and ranks are looked at again and again."""

_ERROR_OF_MEDIAN: Final = 1.2533 * 1.4826
"""The standard error of a median is this, times the median absolute deviation, over the root of the count, where the
values are normal (sqrt(pi / 2), and 1 over the normal's third quartile)."""

_LEAST_S: Final = 1e-9

_FIRST_LEFT_OUT: Final = 2
"""Steps in which memory is found and code compiled, by some ranks more than by others."""


@dataclass(frozen=True, slots=True)
class Change:
    """A rank that has become slow, or is slow no more."""

    rank: int
    is_slow: bool
    above: float
    """By how much its typical step is longer than those of its equals: 0.3 is 30 %."""
    kind: int
    """Index of the kind of work in which it loses most."""


class Stragglers:
    """Looks at the newest steps of a run."""

    def __init__(self, groups: Sequence[Hashable], limit: float) -> None:
        """``groups``: for each rank what its equals have in common. ``limit``: how much longer is too long, as
        a part of the equals' time."""
        by_group: dict[Hashable, list[int]] = {}
        for rank, group in enumerate(groups):
            by_group.setdefault(group, []).append(rank)
        self._equals = [np.array(ranks) for ranks in by_group.values() if len(ranks) > 1]
        self._lonely = np.array([ranks[0] for ranks in by_group.values() if len(ranks) == 1], dtype=np.int64)
        self._limit = limit
        self._best = np.full(len(groups), np.inf)
        self._slow: set[int] = set()
        self._window: list[Array] = []
        self._left_out = 0

    def add(self, steps: Array) -> list[Change]:
        """Add the seconds that ranks were busy in the steps that followed, (steps, ranks, kinds); return whose state is
        another now than after the last call."""
        first = min(max(_FIRST_LEFT_OUT - self._left_out, 0), len(steps))
        self._left_out += first
        self._window = [*self._window, *steps[first:]][-WINDOWS[-1] :]
        if len(self._window) < WINDOWS[0]:
            return []
        window = np.stack(self._window)
        return [*self._judge_equals(window), *self._judge_lonely(window)]

    def _judge_equals(self, window: Array) -> list[Change]:
        return [change for ranks in self._equals for change in self._judge(ranks, window[:, ranks])]

    def _judge_lonely(self, window: Array) -> list[Change]:
        """Judge ranks without equals by how they have changed: those that all change alike were given more to do."""
        ranks = self._lonely
        if len(ranks) < 2:
            return []
        typical = np.median(window[-WINDOWS[0] :, ranks].sum(axis=2), axis=0)
        self._best[ranks] = np.minimum(self._best[ranks], np.maximum(typical, _LEAST_S))
        return self._judge(ranks, window[:, ranks] / self._best[ranks][:, None])

    def _judge(self, ranks: "np.ndarray[Any, np.dtype[np.int64]]", kinds: Array) -> list[Change]:
        """Judge ``ranks`` by how long they were busy with each kind of work, (steps, ranks, kinds)."""
        newest = _Comparison.of(kinds[-WINDOWS[0] :])
        judged = [newest, _Comparison.of(kinds)] if len(kinds) == WINDOWS[-1] else [newest]
        changes = []
        for place, rank in enumerate(ranks.tolist()):
            # Once slow, it is so until it is clearly not: no line again and again for one at the limit.
            if rank in self._slow and newest.above[place] > self._limit / 2:
                continue
            seen = next((window for window in judged if window.is_certainly_above(self._limit, place)), None)
            if (seen is not None) == (rank in self._slow):
                continue
            self._slow ^= {rank}
            shown = seen or newest
            changes.append(Change(rank, seen is not None, float(shown.above[place]), int(shown.lost[place].argmax())))
        return changes


@dataclass(frozen=True, slots=True)
class _Comparison:
    """How the ranks of one group compare with the lower median of them, in one window."""

    above: Array
    """By how much longer each is busy in its typical step, as a part."""
    deviation: Array
    """The same, in standard errors."""
    lost: Array
    """Seconds that each loses in each kind of work, (ranks, kinds)."""

    @classmethod
    def of(cls, kinds: Array) -> "_Comparison":
        """Compare ranks by how long they were busy with each kind of work, (steps, ranks, kinds)."""
        busy = np.log(np.maximum(kinds.sum(axis=2), _LEAST_S))
        middle = int(np.argsort(np.median(busy, axis=0), kind="stable")[(busy.shape[1] - 1) // 2])
        # Step by step, so that what makes a step longer for all is no chance.
        longer = busy - busy[:, [middle]]
        typical = np.median(longer, axis=0)
        errors = _ERROR_OF_MEDIAN * np.median(abs(longer - typical), axis=0) / len(busy) ** 0.5
        of_kinds = np.median(kinds, axis=0)
        return cls(np.exp(typical) - 1, typical / np.maximum(errors, _LEAST_S), of_kinds - of_kinds[middle])

    def is_certainly_above(self, limit: float, place: int) -> bool:
        """Return whether the rank at ``place`` is slower by more than ``limit``, and not by chance."""
        return bool(self.above[place] > limit and self.deviation[place] > _CERTAIN)
