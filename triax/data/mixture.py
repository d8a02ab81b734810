"""Which source does the sample of a given number come from, and which sequence of it is read?

Samples are mixed by blocks of ``BLOCK``. Of each block every source gets its share, rounded so that the shares of all
blocks so far stay next to exact; where weights are whole hundredths, each block has exactly its share. A keyed
permutation spreads the sources over the block. The samples of one source are numbered in the order in which they
appear, and read in the order that the source would have alone. So adding a source, or changing a weight, moves where
the samples of another appear and never which comes after which. Like the order of one source, the mixture is a pure
function of seed and sample number: it knows no ranks, remembers nothing, and costs the same at any number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from operator import add
from typing import Final

import numpy as np
import numpy.typing as npt

from triax.data.order import GOLDEN_GAMMA, Indices, SampleOrder, key_of, mix, permute

BLOCK: Final = 100
"""Small, so that a short run has its shares too; large enough that no pattern in time is left."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Sources in given proportions, without end."""

    weights: tuple[Fraction, ...]
    """Share of each source; positive."""
    seed: int

    def __post_init__(self) -> None:
        if not self.weights or min(self.weights) <= 0:
            raise ValueError(f"weights {self.weights} are not all positive")

    def place(self, samples: npt.ArrayLike) -> tuple[Indices, Indices]:
        """Return for each of ``samples`` its source, and which of that source's samples it is (both from 0)."""
        wanted = np.asarray(samples, dtype=np.int64)
        if len(self.weights) == 1 or not wanted.size:
            return np.zeros_like(wanted), wanted
        blocks, offsets = np.divmod(wanted.ravel(), BLOCK)
        blocks, rows = np.unique(blocks, return_inverse=True)
        sources, numbers = self._blocks(blocks)
        return sources[rows, offsets].reshape(wanted.shape), numbers[rows, offsets].reshape(wanted.shape)

    def counts(self, samples: int) -> tuple[int, ...]:
        """Return how many of the first ``samples`` samples come from each source.

        With two sources never a whole sample from ``weight * samples`` at the end of a block.
        """
        if len(self.weights) == 1:
            return (samples,)
        start = samples // BLOCK * BLOCK
        inside, _ = self.place(np.arange(start, samples))
        counted = np.bincount(inside, minlength=len(self.weights)).tolist()
        return tuple(map(add, counted, apportioned(start, self.weights)))

    def _blocks(self, blocks: Indices) -> tuple[Indices, Indices]:
        """Return source and number of every sample of the ``blocks`` (b,), each as (b, BLOCK)."""
        starts = np.array([apportioned(int(block) * BLOCK, self.weights) for block in blocks])
        ends = np.array([apportioned((int(block) + 1) * BLOCK, self.weights) for block in blocks])
        # Slots are the samples of a block sorted by source: source s has those from lasts[s - 1] up to lasts[s].
        lasts = np.cumsum(ends - starts, axis=1)
        keys = mix(key_of(self.seed, "mixture") + blocks.astype(np.uint64) * GOLDEN_GAMMA)
        shape = (len(blocks), BLOCK)
        slots = permute(np.broadcast_to(np.arange(BLOCK), shape), BLOCK, np.repeat(keys, BLOCK))
        row_firsts = BLOCK * np.arange(len(blocks))[:, None]
        found = np.searchsorted((lasts + row_firsts).ravel(), (slots + row_firsts).ravel(), side="right")
        sources = found.reshape(shape) - len(self.weights) * np.arange(len(blocks))[:, None]
        sorted_by_source = np.argsort(sources, axis=1, kind="stable")
        ranks = np.empty(shape, dtype=np.int64)
        np.put_along_axis(ranks, sorted_by_source, np.broadcast_to(np.arange(BLOCK), shape), axis=1)
        # A sample's rank among all is its rank in its source, and the samples of the sources before.
        return sources, ranks + np.take_along_axis(starts - lasts + (ends - starts), sources, axis=1)


def apportioned(samples: int, weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return whole numbers that sum to ``samples``, near ``weight * samples`` over the sum of ``weights``.

    Each source takes its share, rounded to the nearest, of what the ones before it left. So no number falls when
    ``samples`` grows: x -> round(p x) and x -> x - round(p x) never fall for 0 <= p <= 1. Where all shares are whole
    they are exact. Integers throughout: no size is too large.
    """
    unit = lcm(*(weight.denominator for weight in weights))
    parts = [int(weight * unit) for weight in weights]
    left, total = samples, sum(parts)
    shares = []
    for part in parts:
        share = (2 * left * part + total) // (2 * total)
        shares.append(share)
        left -= share
        total -= part
    return tuple(shares)


@dataclass(frozen=True, slots=True)
class MixedOrder:
    """The order of a run over several sources: samples 0, 1, 2, ... of training without end, and the held-out ones.

    Sequences are numbered over all sources, one source after another.
    """

    mixture: Mixture
    orders: tuple[SampleOrder, ...]
    """The order of each source, as if it were alone."""
    eval_sequences: int
    """Held-out sequences that are measured."""
    holds_out_its_own: bool = False
    """True: all that each source holds out is measured, source after source. False: each holds out ``eval_sequences``,
    and of all of them as many are measured, mixed as in training."""

    def train(self, samples: npt.ArrayLike) -> tuple[Indices, Indices]:
        """Return epoch (of its source) and sequence of each training sample, as arrays of the shape of ``samples``."""
        sources, numbers = self.mixture.place(samples)
        epochs, sequences = np.zeros_like(numbers), np.zeros_like(numbers)
        for source, order in enumerate(self.orders):
            here = sources == source
            epochs[here], local = order.train(numbers[here])
            sequences[here] = local + self._first_sequence(source)
        return epochs, sequences

    def held_out(self, samples: npt.ArrayLike) -> Indices:
        """Return the sequence of each held-out sample, numbered from 0 to ``eval_sequences - 1``."""
        wanted = np.asarray(samples, dtype=np.int64)
        if wanted.size and wanted.max() >= self.eval_sequences:
            raise ValueError(f"held-out sample {wanted.max()} is not in range({self.eval_sequences})")
        sources, numbers = self._own(wanted) if self.holds_out_its_own else self.mixture.place(wanted)
        sequences = np.zeros_like(wanted)
        for source, order in enumerate(self.orders):
            here = sources == source
            sequences[here] = order.held_out(numbers[here]) + self._first_sequence(source)
        return sequences

    def epochs(self, sample: int) -> tuple[float, ...]:
        """Return how often the training sequences of each source were read when ``sample`` is next."""
        read = self.mixture.counts(sample)
        return tuple(count / order.epoch_sequences for count, order in zip(read, self.orders, strict=True))

    def whole_epochs(self, sample: int) -> tuple[int, ...]:
        """Return how often each source was read to its end when ``sample`` is next."""
        read = self.mixture.counts(sample)
        return tuple(count // order.epoch_sequences for count, order in zip(read, self.orders, strict=True))

    def _first_sequence(self, source: int) -> int:
        return sum(order.num_sequences for order in self.orders[:source])

    def _own(self, samples: Indices) -> tuple[Indices, Indices]:
        lasts = np.cumsum([order.eval_sequences for order in self.orders])
        sources = np.searchsorted(lasts, samples, side="right")
        firsts = lasts - [order.eval_sequences for order in self.orders]
        return sources, samples - firsts[sources]
