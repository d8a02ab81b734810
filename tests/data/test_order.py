"""Is the order a permutation, the same for ever, and as cheap at sample 10^9 as at sample 0?"""

import tracemalloc
from collections import Counter
from math import factorial

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.data import order
from triax.data.order import SampleOrder, permute, sample_hash
from triax.errors import BadInput

KEYS = st.integers(0, 2**64 - 1)


def key(value: int) -> npt.NDArray[np.uint64]:
    return np.array([value], dtype=np.uint64)


@pytest.mark.parametrize(
    "size", [1, 2, 3, 5, *(2**power + step for power in (2, 5, 6, 7, 10, 13) for step in (-1, 0, 1))]
)
@pytest.mark.parametrize("value", [0, 1, 2**64 - 1])
def test_permute_is_a_bijection(size: int, value: int) -> None:
    assert sorted(permute(np.arange(size), size, key(value)).tolist()) == list(range(size))


@given(st.integers(1, 3000), KEYS)
def test_permute_is_a_bijection_for_any_size_and_key(size: int, value: int) -> None:
    assert sorted(permute(np.arange(size), size, key(value)).tolist()) == list(range(size))


@given(st.integers(2**40, 2**63 - 1), KEYS, st.sets(st.integers(0, 2**40 - 1), min_size=2, max_size=50))
def test_permute_keeps_large_places_apart(size: int, value: int, places: set[int]) -> None:
    images = permute(np.array(sorted(places)), size, key(value))
    assert len(set(images.tolist())) == len(places)
    assert images.min() >= 0
    assert images.max() < size


@given(st.integers(1, 10**6), st.lists(st.tuples(st.integers(0, 10**6), KEYS), min_size=2, max_size=20))
def test_a_key_per_place_equals_one_by_one(size: int, pairs: list[tuple[int, int]]) -> None:
    places = np.array([place % size for place, _ in pairs])
    together = permute(places, size, np.array([value for _, value in pairs], dtype=np.uint64))
    alone = [int(permute(place, size, key(value))) for place, (_, value) in zip(places, pairs, strict=True)]
    assert together.tolist() == alone


@pytest.mark.parametrize("size", [4, 5, 6])
def test_every_order_of_a_few_is_equally_frequent(size: int) -> None:
    """Chi-squared over all orders, within four standard deviations of its expectation."""
    per_order = 40
    draws = per_order * factorial(size)
    keys = np.repeat(np.arange(draws, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15), size)
    images = permute(np.tile(np.arange(size), draws), size, keys).reshape(draws, size)
    counts = np.array(list(Counter(map(tuple, images.tolist())).values()))
    assert len(counts) == factorial(size)
    chi_squared = float(((counts - per_order) ** 2 / per_order).sum())
    assert abs(chi_squared - factorial(size)) < 4 * (2 * factorial(size)) ** 0.5


def test_a_large_permutation_looks_shuffled() -> None:
    size = 1 << 17
    images = permute(np.arange(size), size, key(3))
    assert abs(np.corrcoef(np.arange(size), images)[0, 1]) < 0.02
    # Both counts are Poisson with mean 1 in a random permutation.
    assert (images == np.arange(size)).sum() < 8
    assert (np.diff(images) == 1).sum() < 8


def test_the_order_never_changes() -> None:
    """Written down once: a change here would give every run in the world another order when it resumes."""
    epochs, sequences = SampleOrder(10, 3, seed=7).train(np.arange(14))
    assert epochs.tolist() == [0] * 7 + [1] * 7
    assert sequences.tolist() == [4, 9, 3, 2, 8, 5, 6, 8, 9, 3, 2, 5, 4, 6]
    assert SampleOrder(10, 3, seed=7).held_out([0, 1, 2]).tolist() == [1, 0, 7]
    assert SampleOrder(10**12, 1000, seed=7).train([0, 10**9, 10**13])[1].tolist() == [
        818814847555, 26241476294, 492226526593,
    ]  # fmt: skip
    assert sample_hash([1, 2, 3]) == "e2e2ea62d0e3a06b"
    assert sample_hash([1, 2, 3], "ab") == "4d4668870ab358ac"


orders = st.integers(1, 300).flatmap(
    lambda size: st.builds(SampleOrder, st.just(size), st.integers(0, size - 1), st.integers(0, 2**63 - 1))
)


@given(orders)
def test_each_epoch_reads_all_that_is_not_held_out(sample_order: SampleOrder) -> None:
    held_out = sample_order.held_out(np.arange(sample_order.eval_sequences)).tolist()
    rest = set(range(sample_order.num_sequences)) - set(held_out)
    assert len(set(held_out)) == sample_order.eval_sequences
    length = sample_order.epoch_sequences
    for epoch in (0, 1, 5):
        epochs, sequences = sample_order.train(np.arange(epoch * length, (epoch + 1) * length))
        assert set(epochs.tolist()) == {epoch}
        assert sorted(sequences.tolist()) == sorted(rest)


@given(orders, st.lists(st.integers(0, 10**12), min_size=1, max_size=30))
def test_a_sample_does_not_depend_on_what_is_asked_with_it(sample_order: SampleOrder, samples: list[int]) -> None:
    together = sample_order.train(samples)[1].tolist()
    assert together == [int(sample_order.train(sample)[1]) for sample in samples]


def test_epochs_and_seeds_differ() -> None:
    def epoch(number: int, seed: int) -> tuple[int, ...]:
        return tuple(SampleOrder(1000, 0, seed).train(np.arange(1000 * number, 1000 * (number + 1)))[1].tolist())

    assert len({epoch(number, seed) for number in range(4) for seed in range(4)}) == 16
    splits = {tuple(SampleOrder(1000, 50, seed).held_out(np.arange(50)).tolist()) for seed in range(4)}
    assert len(splits) == 4


def test_holding_out_more_only_adds() -> None:
    few, many = SampleOrder(500, 10, seed=1), SampleOrder(500, 40, seed=1)
    assert few.held_out(np.arange(10)).tolist() == many.held_out(np.arange(10)).tolist()


@pytest.mark.parametrize("sample", [0, 10**9, 10**15])
def test_any_sample_costs_the_same(sample: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: integers stirred and bytes allocated for a microbatch of a corpus of 10^12 sequences.

    Expected are 2 permutations x (2^40 / 10^12 = 1.1) passes x 8 rounds x up to 2 stirs, 36 for each sample.
    """
    stirred = 0
    mix = order.mix

    def counting_mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        nonlocal stirred
        stirred += x.size
        return mix(x)

    monkeypatch.setattr(order, "mix", counting_mix)
    corpus = SampleOrder(10**12, 1000, seed=5)
    tracemalloc.start()
    corpus.train(np.arange(sample, sample + 64))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert stirred < 64 * 60
    assert peak_bytes < 64 << 10


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=20, unique=True), st.data())
def test_sample_hash_sees_every_change(sequences: list[int], data: st.DataObject) -> None:
    name = sample_hash(sequences)
    assert len(name) == 16
    assert int(name, 16) >= 0
    assert sample_hash(np.array(sequences)) == name
    at = data.draw(st.integers(0, len(sequences) - 1))
    changed = [*sequences[:at], sequences[at] + 1, *sequences[at + 1 :]]
    assert len({name, sample_hash(changed), sample_hash(sequences[:-1]), sample_hash(sequences, "corpus")}) == 4


@pytest.mark.parametrize(("size", "held_out"), [(1, 1), (10, 10), (10, 11)])
def test_holding_out_everything_is_refused(size: int, held_out: int) -> None:
    with pytest.raises(BadInput, match=rf"eval\.sequences={held_out} leaves none of {size} .* at most {size - 1}"):
        SampleOrder(size, held_out, seed=0)


def test_numbers_that_are_no_samples_are_refused() -> None:
    sample_order = SampleOrder(10, 3, seed=0)
    with pytest.raises(ValueError, match="-1"):
        sample_order.train([0, -1])
    with pytest.raises(ValueError, match="range"):
        sample_order.held_out(3)
    with pytest.raises(ValueError, match="range"):
        permute(5, 5, key(0))
