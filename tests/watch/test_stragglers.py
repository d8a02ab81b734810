"""Is a slow rank found within fifty steps, whatever else makes steps longer, and never one that is not slow?"""

from collections.abc import Sequence

import numpy as np
import pytest

from triax.watch.stragglers import Array, Change, Stragglers

SHARED = 10
LIMIT = 0.15


def noisy(steps: int, busy_s: Sequence[float], seed: int, noise: float = 0.08, hit: float = 0.05) -> Array:
    """Return how long ranks are busy, (steps, ranks, 2), on servers that also do other work: all of it takes a varying
    time, and a part ``hit`` of all steps takes up to four times as long, on any rank."""
    dice = np.random.default_rng(seed)
    shape = (steps, len(busy_s))
    times = np.array(busy_s) * np.exp(dice.normal(0, noise, shape)) * np.exp(dice.normal(0, 0.1, (steps, 1)))
    times *= np.where(dice.random(shape) < hit, dice.uniform(1, 4, shape), 1)
    return np.stack((times / 3, 2 * times / 3), axis=2)


def judged(steps: Array, groups: Sequence[object]) -> list[tuple[int, Change]]:
    """Return every change with the step after which it was told."""
    stragglers, found = Stragglers([str(group) for group in groups], LIMIT), []
    for first in range(0, len(steps), SHARED):
        found += [(first + SHARED, change) for change in stragglers.add(steps[first : first + SHARED])]
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
def test_a_rank_a_third_slower_is_found_within_fifty_steps(ranks: int) -> None:
    """And told once, wherever it begins; the others are not."""
    for seed in range(10):
        slow, begins = seed % ranks, 10 * (seed % 4) + seed
        busy = noisy(begins + 60, [1.0] * ranks, seed)
        busy[begins:, slow] *= 1.3
        found = judged(busy, [0] * ranks)
        assert [(change.rank, change.is_slow) for _, change in found] == [(slow, True)], seed
        step, change = found[0]
        assert step <= begins + 50
        assert 0.15 < change.above < 0.45


@pytest.mark.parametrize("groups", [[0] * 2, [0] * 8, [0, 0, 1, 1], [0, 1], [0, 1, 2, 3], [0, 0, 1]])
def test_no_rank_of_a_clean_run_is_named(groups: list[int]) -> None:
    """Over 20 runs of 1,000 steps, also where pipeline ranks have different work."""
    for seed in range(20):
        busy = noisy(1000, [1.0 + group for group in groups], seed, noise=0.25, hit=0.1)
        assert judged(busy, groups) == [], seed


@pytest.mark.parametrize("groups", [[0, 1], [0, 1, 2, 3]])
def test_a_pipeline_rank_without_an_equal_that_becomes_slow_is_found(groups: list[int]) -> None:
    for seed in range(20):
        busy = noisy(120, [1.0 + group for group in groups], seed)
        busy[60:, 1] *= 1.3
        found = judged(busy, groups)
        assert [(change.rank, change.is_slow) for _, change in found] == [(1, True)], seed
        assert found[0][0] <= 110


def test_what_makes_all_slower_names_none() -> None:
    """As longer documents do, which cost attention more."""
    busy = noisy(200, [1.0, 2.0, 1.5, 1.0], seed=1)
    busy[80:] *= 1.6
    assert judged(busy, [0, 1, 2, 3]) == []


def test_a_rank_that_recovers_is_told() -> None:
    busy = noisy(200, [1.0] * 4, seed=3)
    busy[20:100, 2] *= 1.5
    assert [(change.rank, change.is_slow) for _, change in judged(busy, [0] * 4)] == [(2, True), (2, False)]


def test_the_work_in_which_it_loses_most_is_named() -> None:
    busy = noisy(60, [1.0] * 4, seed=4)
    busy[:, 1, 0] *= 3
    ((_, change),) = judged(busy, [0] * 4)
    assert (change.rank, change.kind) == (1, 0)


def test_the_first_steps_of_a_rank_may_take_longer() -> None:
    busy = noisy(40, [1.0] * 2, seed=5)
    busy[:2, 1] *= 1000
    assert judged(busy, [0, 0]) == []


def test_a_rank_that_is_never_busy_is_no_measure() -> None:
    """As where a clock stands still."""
    busy = np.zeros((60, 3, 2))
    assert judged(busy, [0, 0, 0]) == []
    assert judged(busy, [0, 1, 2]) == []
