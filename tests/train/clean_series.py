"""What do losses and gradient norms of a healthy run look like? Simulated series, another one for each seed.

Losses fall by a power law from that of guessing, held up a little while the learning rate is high, with noise that is
larger at first, correlated, and has heavier tails than a normal distribution. Gradient norms fall from a high start;
the scatter of their logarithm has heavy tails: one step in a thousand has several times its level. Learning rates warm
up and follow a cosine, a cosine with restarts, or stay and decline.
"""

import math

import numpy as np
import numpy.typing as npt

Series = npt.NDArray[np.float64]


def clean_series(seed: int, steps: int = 1000) -> tuple[Series, Series]:
    """Return the losses and gradient norms of a run without any fault."""
    chance = np.random.default_rng(seed)
    step = np.arange(steps)
    rate = _learning_rate(chance, step)
    start, floor = math.log(int(chance.choice([257, 32_000, 128_000]))), chance.uniform(1.5, 3.0)
    power, speed = chance.uniform(0.3, 0.7), chance.uniform(0.02, 0.3)
    level = floor + (start - floor) / (1 + np.cumsum(rate) * speed) ** power
    level *= 1 + chance.uniform(0.0, 0.04) * _lagging(rate, 0.1)
    noise = _correlated(chance.standard_t(chance.uniform(8, 30), steps), chance.uniform(0.0, 0.25))
    losses = level * (1 + chance.uniform(0.003, 0.03) * noise * (1 + 2 * np.exp(-step / 100)))
    scatter = _correlated(chance.standard_t(chance.uniform(5, 12), steps), chance.uniform(0.0, 0.2))
    logs = math.log(chance.uniform(0.1, 3.0)) + 2 * np.exp(-step / chance.uniform(20, 200)) + 0.5 * rate
    return losses, np.exp(logs + chance.uniform(0.05, 0.35) * scatter)


def _learning_rate(chance: np.random.Generator, step: "npt.NDArray[np.int64]") -> Series:
    steps = len(step)
    warm = np.minimum((step + 1) / chance.integers(1, 200), 1.0)
    kind, period = chance.choice(["cosine", "restarts", "decline"]), chance.integers(150, 400)
    if kind == "decline":
        return warm * np.clip((steps - step) / (0.2 * steps), 0.1, 1.0)
    phase = step / steps if kind == "cosine" else (step % period) / period
    return warm * (0.1 + 0.45 * (1 + np.cos(np.pi * phase)))


def _lagging(values: Series, part: float) -> Series:
    lagging, last = np.empty_like(values), 0.0
    for index, value in enumerate(values):
        last += part * (value - last)
        lagging[index] = last
    return lagging


def _correlated(values: Series, part: float) -> Series:
    return values + part * np.concatenate(([0.0], values[:-1]))
