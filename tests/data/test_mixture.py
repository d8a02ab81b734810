"""Is the mixture exact in its counts, the same for ever, and blind to everything but seed and sample number?"""

import tracemalloc
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.data.mixture import BLOCK, MixedOrder, Mixture, apportioned
from triax.data.order import SampleOrder

SEEDS = st.integers(0, 2**63 - 1)
weights_of_some = st.lists(st.integers(1, 1000), min_size=1, max_size=8).map(
    lambda parts: tuple(Fraction(part, sum(parts)) for part in parts)
)


def shares(*hundredths: int) -> tuple[Fraction, ...]:
    return tuple(Fraction(part, 100) for part in hundredths)


@given(SEEDS, st.integers(0, 10**13))
def test_whole_hundredths_are_exact_in_every_block(seed: int, block: int) -> None:
    sources, _ = Mixture(shares(70, 25, 4, 1), seed).place(np.arange(block * BLOCK, (block + 1) * BLOCK))
    assert np.bincount(sources).tolist() == [70, 25, 4, 1]


@given(weights_of_some, SEEDS, st.integers(0, 2**40), st.integers(1, 450))
def test_counts_follow_the_weights(weights: tuple[Fraction, ...], seed: int, first: int, length: int) -> None:
    """At any number, from any number: what is counted one by one, and never far from weight times samples."""
    mixture = Mixture(weights, seed)
    sources, _ = mixture.place(np.arange(first, first + length))
    before, after = mixture.counts(first), mixture.counts(first + length)
    assert [b - a for a, b in zip(before, after, strict=True)] == np.bincount(sources, minlength=len(weights)).tolist()
    edge = (first // BLOCK + 1) * BLOCK
    assert all(abs(count - weight * edge) < 2 for count, weight in zip(mixture.counts(edge), weights, strict=True))
    assert sum(mixture.counts(first)) == first


def test_two_sources_are_never_half_a_sample_off() -> None:
    weights = (Fraction(1, 3), Fraction(2, 3))
    for samples in range(0, 100_000, BLOCK):
        assert abs(apportioned(samples, weights)[0] - weights[0] * samples) <= Fraction(1, 2)


@given(weights_of_some, st.integers(0, 2**62), st.integers(0, 300))
def test_shares_never_fall(weights: tuple[Fraction, ...], samples: int, more: int) -> None:
    before, after = apportioned(samples, weights), apportioned(samples + more, weights)
    assert sum(after) == samples + more
    assert all(0 <= a <= b for a, b in zip(before, after, strict=True))


def test_weights_of_any_size() -> None:
    tiny = Fraction(1, 10**600)
    mixture = Mixture((tiny, 1 - tiny), 0)
    assert mixture.counts(10**15) == (0, 10**15)
    many = Mixture(tuple(Fraction(1, 1024) for _ in range(1024)), 5)
    assert set(many.counts(1024 * 100)) == {100}
    for wrong in ((), (Fraction(0), Fraction(1)), (Fraction(-1), Fraction(2))):
        with pytest.raises(ValueError, match="not all positive"):
            Mixture(wrong, 0)


@given(weights_of_some, SEEDS, st.integers(0, 30))
def test_each_source_is_read_in_order(weights: tuple[Fraction, ...], seed: int, block: int) -> None:
    """Its samples are numbered 0, 1, 2, ... as they appear, whatever the others are."""
    mixture = Mixture(weights, seed)
    first = block * BLOCK + 17
    sources, numbers = mixture.place(np.arange(first, first + 300))
    for source, count in enumerate(mixture.counts(first)):
        its = numbers[sources == source]
        assert its.tolist() == list(range(count, count + len(its)))


@given(weights_of_some, SEEDS, st.lists(st.integers(0, 2**50), min_size=1, max_size=20))
def test_a_sample_does_not_depend_on_what_is_asked_with_it(
    weights: tuple[Fraction, ...], seed: int, samples: list[int]
) -> None:
    mixture = Mixture(weights, seed)
    together = np.stack(mixture.place(samples), axis=1).tolist()
    assert together == [[int(value) for value in mixture.place(sample)] for sample in samples]


def test_sources_are_spread_over_a_block() -> None:
    """No pattern in time: over many blocks each place has each source in its share."""
    sources, _ = Mixture(shares(50, 50), 1).place(np.arange(400 * BLOCK))
    by_place = sources.reshape(400, BLOCK).mean(axis=0)
    assert abs(by_place - 0.5).max() < 0.15
    assert len({tuple(block) for block in sources.reshape(400, BLOCK).tolist()}) == 400


def test_seeds_differ() -> None:
    mixed = {tuple(Mixture(shares(50, 50), seed).place(np.arange(BLOCK))[0].tolist()) for seed in range(20)}
    assert len(mixed) == 20


def test_the_mixture_never_changes() -> None:
    """Written down once: a change here would give every mixed run in the world other data when it resumes."""
    sources, numbers = Mixture(shares(50, 30, 20), seed=7).place([*range(8), 10**12])
    assert sources.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert numbers.tolist() == [0, 1, 2, 0, 1, 3, 4, 2, 300000000000]


@pytest.mark.parametrize("sample", [0, 10**9, 10**15])
def test_any_sample_costs_the_same(sample: int) -> None:
    mixture = Mixture(shares(50, 30, 20), seed=7)
    tracemalloc.start()
    mixture.place(np.arange(sample, sample + 64))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100 << 10


def order_of(sizes: Sequence[int], weights: tuple[Fraction, ...], held_out: int, seed: int) -> MixedOrder:
    orders = tuple(SampleOrder(size, held_out, seed) for size in sizes)
    return MixedOrder(Mixture(weights, seed), orders, held_out)


def read_of(order: MixedOrder, source: int, samples: int) -> list[int]:
    """The sequences of one source, numbered in it, in the order in which the first samples read them."""
    first = sum(one.num_sequences for one in order.orders[:source])
    sequences = order.train(np.arange(samples))[1] - first
    return sequences[(sequences >= 0) & (sequences < order.orders[source].num_sequences)].tolist()


@given(SEEDS, st.integers(0, 5))
def test_a_source_added_leaves_the_order_of_the_others(seed: int, held_out: int) -> None:
    """Each reads what it would alone, however many are beside it, wherever they stand and whatever their weights."""
    alone = order_of([50], shares(100), held_out, seed)
    two = order_of([50, 31], shares(60, 40), held_out, seed)
    three = order_of([12, 50, 31], shares(25, 35, 40), held_out, seed)
    for order, source in ((two, 0), (three, 1)):
        read = read_of(order, source, 1000)
        assert read == read_of(alone, 0, len(read))
    assert read_of(two, 1, 500) == read_of(three, 2, 500)


def test_epochs_count_each_source() -> None:
    order = order_of([50, 10], shares(50, 50), 5, 0)
    assert order.epochs(0) == (0, 0)
    assert order.epochs(900) == (450 / 45, 450 / 5)
    assert order.whole_epochs(99) in ((1, 9), (1, 10))
    epochs, sequences = order.train(np.arange(900))
    for source, (first, last) in enumerate(((0, 50), (50, 60))):
        inside = (sequences >= first) & (sequences < last)
        assert np.bincount(epochs[inside]).tolist() == [order.orders[source].epoch_sequences] * (10, 90)[source]


@given(SEEDS)
def test_held_out_sequences_are_never_trained_on(seed: int) -> None:
    mixed = order_of([40, 30], shares(80, 20), 10, seed)
    own = MixedOrder(mixed.mixture, (SampleOrder(40, 7, seed), SampleOrder(30, 3, seed)), 10, holds_out_its_own=True)
    for order in (mixed, own):
        held_out = order.held_out(np.arange(10))
        assert len(set(held_out.tolist())) == 10
        assert not set(held_out.tolist()) & set(order.train(np.arange(2000))[1].tolist())
        with pytest.raises(ValueError, match="range"):
            order.held_out(10)
    first = mixed.mixture.place(np.arange(10))[0]
    assert (mixed.held_out(np.arange(10)) < 40).tolist() == (first == 0).tolist()
    assert (own.held_out(np.arange(10)) < 40).tolist() == [True] * 7 + [False] * 3
