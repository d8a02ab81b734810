"""Which few settings try every two values together? A greedy pairwise cover (Cohen et al. 1997, the AETG system)."""

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

Setting = dict[str, Any]
"""A value for each knob, by the knob's name."""
Pair = tuple[tuple[str, Any], tuple[str, Any]]

_CANDIDATES = 8
"""Settings that are grown for each one that is taken."""


def pairs_of(setting: Setting) -> Iterator[Pair]:
    """Yield every two knobs of ``setting`` with their values."""
    yield from combinations(sorted(setting.items()), 2)


def all_pairs(bound: Sequence[Setting], free: Mapping[str, Sequence[Any]], never: Collection[Pair]) -> set[Pair]:
    """Return every two values that can meet: two of a bound setting, or one of a free knob with any other knob's."""
    pairs = {pair for setting in bound for pair in pairs_of(setting)}
    bound_items = {item for setting in bound for item in setting.items()}
    free_items = {(name, value) for name, values in free.items() for value in values}
    pairs |= {_pair(one, other) for one in bound_items for other in free_items}
    pairs |= {_pair(one, other) for one, other in combinations(free_items, 2) if one[0] != other[0]}
    return pairs - {_pair(*pair) for pair in never}


def pairwise_cover(
    bound: Sequence[Setting], free: Mapping[str, Sequence[Any]], never: Collection[Pair] = ()
) -> list[Setting]:
    """Return settings in which every two values meet that can, the same at every call.

    ``bound`` are all legal settings of the knobs that rule each other out; each of them goes with any value of the
    ``free`` knobs. ``never`` are pairs of values, of which one at least is of a free knob, that do not go together; all
    knobs must have others.
    """
    chance = random.Random(0)
    never = {_pair(*pair) for pair in never}
    missing = all_pairs(bound, free, never)
    cover = []
    for pair in chance.sample(sorted(missing, key=repr), len(missing)):
        if pair not in missing:
            continue
        target = dict(pair)
        banned = {other for clash in never for one, other in (clash, clash[::-1]) if one in pair}
        fitting = [
            setting for setting in bound
            if all(setting.get(name, v) == v for name, v in target.items()) and banned.isdisjoint(setting.items())
        ]  # fmt: skip
        starts = chance.sample(fitting, min(_CANDIDATES, len(fitting)))
        grown = [_grown(start | target, free, never, missing, chance) for start in starts]
        best = max(grown, key=lambda setting: sum(pair in missing for pair in pairs_of(setting)))
        missing.difference_update(pairs_of(best))
        cover.append(best)
    return cover


def _grown(
    start: Setting, free: Mapping[str, Sequence[Any]], never: set[Pair], missing: set[Pair], chance: random.Random
) -> Setting:
    """Return ``start`` with a value for each free knob, in random order, each one that brings the most pairs."""
    setting = dict(start)
    for name in chance.sample(sorted(free), len(free)):
        if name not in setting:
            scores = {}
            for value in chance.sample(free[name], len(free[name])):
                pairs = {_pair(item, (name, value)) for item in setting.items()}
                if not pairs & never:
                    scores[value] = len(pairs & missing)
            setting[name] = max(scores, key=scores.__getitem__)
    return setting


def _pair(one: tuple[str, Any], other: tuple[str, Any]) -> Pair:
    return (one, other) if one[0] < other[0] else (other, one)
