"""Which sequence is the sample of a given number?

The answer is a pure function of (seed, epoch, sample number). It knows nothing of ranks, microbatches or what was read
before, so any layout reads the same samples in the same step, and resuming is one integer. Each answer costs the same,
however far into the data.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from triax.errors import BadInput

Indices = npt.NDArray[np.int64]

_ROUNDS: Final = 8

_FEWEST_BITS: Final = 5
"""Halves of one bit know too few functions: with these, all 5,040 orders of 7 are equally frequent (chi-squared), and
with the 3 bits that 7 needs they are not."""

GOLDEN_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio, made odd: the step of SplitMix64's counter."""


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The order of a run: samples 0, 1, 2, ... of training without end, and the held-out ones.

    ``eval_sequences`` of the ``num_sequences`` are held out of training, chosen by the seed alone. The others are all
    read once per epoch, in an order of its own for each epoch.
    """

    num_sequences: int
    eval_sequences: int
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.eval_sequences < self.num_sequences:
            raise BadInput(
                f"eval.sequences={self.eval_sequences:,} leaves none of {self.num_sequences:,} to train on: "
                f"hold out at most {self.num_sequences - 1:,}, give more text, or set a shorter data.seq_len."
            )

    @property
    def epoch_sequences(self) -> int:
        """Samples of one epoch of training."""
        return self.num_sequences - self.eval_sequences

    def train(self, samples: npt.ArrayLike) -> tuple[Indices, Indices]:
        """Return epoch and sequence of each training sample, as arrays of the shape of ``samples`` (numbers from 0)."""
        numbers = np.asarray(samples, dtype=np.int64)
        if numbers.size and numbers.min() < 0:
            raise ValueError(f"no sample is numbered {numbers.min()}")
        epochs, places = np.divmod(numbers.ravel(), self.epoch_sequences)
        keys = mix(key_of(self.seed, "train") + epochs.astype(np.uint64) * GOLDEN_GAMMA)
        shuffled = permute(places, self.epoch_sequences, keys)
        sequences = self._split(shuffled + self.eval_sequences)
        return epochs.reshape(numbers.shape), sequences.reshape(numbers.shape)

    def held_out(self, samples: npt.ArrayLike) -> Indices:
        """Return the sequence of each held-out sample, numbered from 0 to ``eval_sequences - 1``."""
        numbers = np.asarray(samples, dtype=np.int64)
        if numbers.size and numbers.max() >= self.eval_sequences:
            raise ValueError(f"held-out sample {numbers.max()} is not in range({self.eval_sequences})")
        return self._split(numbers)

    def _split(self, places: Indices) -> Indices:
        """The held-out sequences are the first of one fixed permutation of all, and training has the rest."""
        return permute(places, self.num_sequences, key_of(self.seed, "split"))


def permute(places: npt.ArrayLike, size: int, keys: npt.NDArray[np.uint64]) -> Indices:
    """Return where a permutation of ``range(size)`` sends each of ``places``; one permutation per key.

    A Feistel network (Luby and Rackoff 1988, doi:10.1137/0217022) permutes the integers below 2^b, b the bits of
    ``size - 1`` or 5; a result that is not below ``size`` is sent through again until one is (cycle walking: Black and
    Rogaway 2002, doi:10.1007/3-540-45760-7_9). The walk ends, for it follows a cycle that holds its start; since
    2^b < 2 * size, fewer than two passes are expected (up to 32 where size is tiny). Nothing is stored, and any place
    costs the same. ``keys`` (uint64) is one key or has the shape of ``places``; 1 <= size < 2^63.
    """
    places = np.asarray(places, dtype=np.int64)
    if places.size and (places.min() < 0 or places.max() >= size):
        raise ValueError(f"places lie in [{places.min()}, {places.max()}], not in range({size})")
    bits = max((size - 1).bit_length(), _FEWEST_BITS)
    keys = keys.ravel()
    images = _feistel(places.ravel().astype(np.uint64), bits, keys)
    walking = np.flatnonzero(images >= size)
    while walking.size:
        images[walking] = _feistel(images[walking], bits, keys[walking] if keys.size > 1 else keys)
        walking = walking[images[walking] >= size]
    return images.astype(np.int64).reshape(places.shape)


def sample_hash(sequences: npt.ArrayLike, corpus: str = "") -> str:
    """Return 16 hexadecimal digits that name the ``sequences`` of a step, in the order of their sample numbers.

    ``corpus`` names what the numbers count, so that equal hashes mean equal data.
    """
    numbers = np.asarray(sequences, dtype="<i8")
    return hashlib.blake2b(f"{corpus}\n".encode() + numbers.tobytes(), digest_size=8).hexdigest()


def key_of(seed: int, purpose: str) -> npt.NDArray[np.uint64]:
    """Return one uint64, unrelated for different purposes and for neighbouring seeds.

    An array, since numpy lets the integers of arrays wrap around in silence and those of scalars not.
    """
    digest = hashlib.blake2b(f"{purpose} {seed}".encode(), digest_size=8).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(x: npt.NDArray[np.uint64], bits: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the image of each ``x`` below 2^bits.

    The halves differ by one bit where ``bits`` is odd, and change places each round; after an even number of rounds
    they have their first widths again. Any round function gives a permutation, because a round can be undone:
    (left, right) -> (right, left ^ f(right)).
    """
    left_bits, right_bits = np.uint64((bits + 1) // 2), np.uint64(bits // 2)
    one = np.uint64(1)
    left, right = x >> right_bits, x & ((one << right_bits) - one)
    left_mask, right_mask = (one << left_bits) - one, (one << right_bits) - one
    for _ in range(_ROUNDS):
        keys = keys + GOLDEN_GAMMA
        left, right = right, left ^ (mix(mix(keys) + right) & left_mask)
        left_mask, right_mask = right_mask, left_mask
    return left << right_bits | right


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return each ``x`` with its bits stirred: the finaliser of SplitMix64 (Steele, Lea and Flood 2014,
    doi:10.1145/2660193.2660195, figure 16; constants of Stafford's variant 13)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
