"""Is the interval the best one, and the useful part of the time what a simulation of failures finds?"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.spec.checkpoint_interval import best_interval_s, mean_time_between_failures_s, useful_fraction


def test_llama_3s_failures() -> None:
    """arXiv:2407.21783, section 3.3.4: 419 unexpected interruptions in 54 days of 2,048 servers, one in three hours."""
    rate = 419 / 54 / 2048 * 1000
    assert mean_time_between_failures_s(2048, rate) / 3600 == pytest.approx(3.09, abs=0.01)


@given(st.floats(1, 300), st.floats(3600, 1e6))
def test_no_other_interval_is_better(save_s: float, failure_s: float) -> None:
    best = best_interval_s(save_s, failure_s)
    reached = useful_fraction(best, save_s, 300.0, failure_s)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert useful_fraction(best * factor, save_s, 300.0, failure_s) <= reached + 1e-4


def test_a_save_longer_than_machines_live_is_made_as_often_as_they_fail() -> None:
    assert best_interval_s(100.0, 150.0) == 150.0


@pytest.mark.parametrize(("save_s", "failure_s"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 5.0)])
def test_nonsense_has_no_interval(save_s: float, failure_s: float) -> None:
    with pytest.raises(ValueError, match="no interval"):
        best_interval_s(save_s, failure_s)


def test_a_simulation_finds_the_same_fraction() -> None:
    dice = random.Random(1)
    interval, save, restart, failure = 1800.0, 60.0, 600.0, 10_000.0
    clock = done = 0.0
    until = dice.expovariate(1 / failure)

    def passes(seconds: float) -> bool:
        nonlocal clock, until
        if until > seconds:
            until, clock = until - seconds, clock + seconds
            return True
        clock, until = clock + until, dice.expovariate(1 / failure)
        return False

    while done < 4e7:
        if passes(interval + save):
            done += interval
            continue
        while not passes(restart):
            pass
    assert done / clock == pytest.approx(useful_fraction(interval, save, restart, failure), rel=0.01)


def test_hopeless_is_zero() -> None:
    assert useful_fraction(1e6, 1.0, 1.0, 1.0) == 0.0
