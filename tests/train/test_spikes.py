"""Does the guard keep still over healthy runs, and see a spike of a known size in the step that has it?"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.clean_series import Series, clean_series
from triax.spec.run import GuardSpec
from triax.train.spikes import NO_BOUNDS, Bounds, bounds, history_of

SPEC = GuardSpec()


@dataclass(frozen=True)
class Watched:
    """What the guard's bounds were over a series, and which steps they call spikes."""

    limits: list[Bounds]
    spikes: list[int]


def watch(losses: Series, norms: Series, spec: GuardSpec = SPEC) -> Watched:
    """Judge a series as the loop does: bounds from the good steps before, the newest left out."""
    seen: list[tuple[float, float]] = []
    limits, spikes = [], []
    for step, (loss, norm) in enumerate(zip(losses.tolist(), norms.tolist(), strict=True)):
        known = seen[-history_of(spec) : -1]
        limit = bounds([loss for loss, _ in known], [norm for _, norm in known], spec)
        limits.append(limit)
        if loss > limit.loss or norm > limit.grad_norm:
            spikes.append(step)
        else:
            seen.append((loss, norm))
    return Watched(limits, spikes)


def test_no_false_alarm_over_clean_runs() -> None:
    """24 runs of 1,000 steps; `make test-all` watches 200 others."""
    assert {seed: found for seed in range(24) if (found := watch(*clean_series(seed)).spikes)} == {}


@pytest.mark.slow
def test_hardly_any_false_alarm_over_two_hundred_runs() -> None:
    """One was measured in 600 runs: seed 1590, a lone gradient norm of twelve times its level."""
    alarms = {seed: found for seed in range(1000, 1200) if (found := watch(*clean_series(seed)).spikes)}
    print(f"\nsteps with a false alarm, by run: {alarms}")
    assert len(alarms) <= 1


@pytest.mark.parametrize(("rise", "least"), [(0.25, 0.6), (0.5, 0.95), (1.0, 1.0)])
def test_a_loss_that_jumps_is_seen_at_once(rise: float, least: float) -> None:
    """A quarter above its level is within the noise of some of these runs; half as much again of hardly any."""
    seen = 0
    for seed in range(40):
        losses, norms = (series[:400] for series in clean_series(seed))
        losses[300] *= 1 + rise
        seen += 300 in watch(losses, norms).spikes
    assert seen >= least * 40


@pytest.mark.parametrize(("factor", "least"), [(10.0, 0.3), (100.0, 0.8), (1000.0, 1.0)])
def test_a_gradient_norm_that_jumps_is_seen_at_once(factor: float, least: float) -> None:
    """Norms of healthy runs scatter widely, and clipping takes care of ten times their level."""
    seen = 0
    for seed in range(20):
        losses, norms = (series[:400] for series in clean_series(seed))
        norms[300] *= factor
        seen += 300 in watch(losses, norms).spikes
    assert seen >= least * 20


def test_steps_are_not_judged_before_half_a_window_is_known() -> None:
    losses, norms = clean_series(1)
    limits = watch(losses[:120], norms[:120]).limits
    first = next(step for step, limit in enumerate(limits) if limit != NO_BOUNDS)
    assert first == SPEC.window // 8 + SPEC.window // 2 + 1
    assert all(math.isfinite(limit.loss) and math.isfinite(limit.grad_norm) for limit in limits[first:])


@given(st.lists(st.floats(0, 1e300), max_size=60), st.lists(st.floats(0, 1e300), max_size=60))
def test_any_history_gives_bounds(losses: list[float], norms: list[float]) -> None:
    limit = bounds(losses, norms, GuardSpec(window=16))
    assert limit.loss >= 0
    assert limit.grad_norm >= 0


def test_only_the_remembered_part_of_a_history_counts() -> None:
    losses, norms = (series.tolist() for series in clean_series(3))
    kept = history_of(SPEC) - 1
    assert bounds(losses, norms, SPEC) == bounds(losses[-kept:], norms[-kept:], SPEC)


def test_even_losses_do_not_make_the_guard_nervous() -> None:
    limit = bounds([2.0] * 200, [0.5] * 200, SPEC)
    assert limit == Bounds(2.2, 2.0)


def test_a_spike_does_not_hide_the_next_one() -> None:
    losses, norms = clean_series(5)
    losses[[300, 305, 310]] += 8
    assert watch(losses, norms).spikes == [300, 305, 310]
    assert np.isfinite(losses).all()
