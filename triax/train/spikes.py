"""Is a loss or a gradient norm still one that a healthy run has? Bounds for the coming step from the steps before it.

Each step is compared with the median of the few steps before it. How far such comparisons scatter over a window (median
and MAD, the median absolute deviation; Hampel 1974, doi:10.1080/01621459.1974.10482962) says how far the next one may
lie. Neither a falling loss nor a few outliers move that, and only what is too large is a spike. Of gradient norms the
logarithm is compared: they are skewed, and a ratio is what matters.

Everything is a pure function of numbers that all ranks share. Torch-free.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from triax.spec.run import GuardSpec

_RECENT_PARTS: Final = 8
"""The level is the median of this part of a window."""

_MAD_TO_SIGMA: Final = 1.4826
"""MAD of a normal distribution times this is its standard deviation."""

_SMALLEST_RISE: Final = 0.1
"""A loss less than this part above its level is no spike, however even the steps before were (*assumed*)."""

_SMALLEST_RATIO: Final = 4.0
"""So is a gradient norm of less than this many times its level: clipping takes care of those (*assumed*)."""

_LARGEST_LOG: Final = 700.0
"""The number with a larger logarithm is none that fp64 can hold."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest loss and gradient norm that a step may have; infinite where nothing is known yet."""

    loss: float = math.inf
    grad_norm: float = math.inf


NO_BOUNDS: Final = Bounds()


def history_of(spec: GuardSpec) -> int:
    """Return how many steps are remembered: a window, those before it that it is compared with, and the newest."""
    return spec.window + _recent(spec) + 1


def bounds(losses: Sequence[float], grad_norms: Sequence[float], spec: GuardSpec) -> Bounds:
    """Return the bounds of the step after those given, which were all good, the oldest first.

    Infinite, as long as half a window of comparisons has not been made.
    """
    loss_level, loss_rise = _level_and_rise(np.array(losses[-history_of(spec) + 1 :]), spec, spec.loss_threshold)
    with np.errstate(divide="ignore"):
        logs = np.log(np.array(grad_norms[-history_of(spec) + 1 :]))
    norm_level, norm_rise = _level_and_rise(logs, spec, spec.grad_norm_threshold)
    norm_limit = norm_level + max(norm_rise, math.log(_SMALLEST_RATIO))
    return Bounds(
        loss=_short(loss_level + max(loss_rise, _SMALLEST_RISE * abs(loss_level))),
        grad_norm=_short(math.exp(norm_limit)) if norm_limit < _LARGEST_LOG else math.inf,
    )


def _level_and_rise(values: "npt.NDArray[np.float64]", spec: GuardSpec, threshold: float) -> tuple[float, float]:
    """Return where the next of ``values`` is expected, and how much higher it may be."""
    recent = _recent(spec)
    if len(values) < recent + spec.window // 2 or not np.isfinite(values).all():
        return math.inf, 0.0
    levels = np.median(sliding_window_view(values, recent), axis=1)
    risen = values[recent:] - levels[:-1]
    middle = float(np.median(risen))
    scatter = _MAD_TO_SIGMA * float(np.median(np.abs(risen - middle)))
    # A series that falls has a negative middle; that it falls no more is no spike.
    return float(levels[-1]), max(middle, 0.0) + threshold * scatter


def _recent(spec: GuardSpec) -> int:
    return max(spec.window // _RECENT_PARTS, 3)


def _short(value: float) -> float:
    """Return ``value`` with six digits: it reads well, and processors that differ in the last bit agree."""
    return float(f"{value:.6g}")
