"""Do the inverse questions have the answers that the direct ones confirm?"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.cases import case_of
from triax.plan.enumerate import Fixed
from triax.plan.inverse import (
    cheapest,
    context_pays_from,
    deepest_network,
    fewest_cards,
    fits_at_all,
    largest,
    longest_sequence,
    network_speeds,
    sizes,
)  # fmt: skip
from triax.plan.search import Ranking, search


def test_from_where_on_sequences_are_cut() -> None:
    """The best layout of that length cuts, of half of it does not; where few tokens are asked for none does."""
    case = case_of("llama-3.1-8b", "2x8xh100", 1024, seq_len=4096)
    found = context_pays_from(case)
    assert found is not None
    assert found.cp > 1
    assert found.seq_len > 4096
    for seq_len, is_cut in ((found.seq_len, True), (found.seq_len // 2, False)):
        workload = replace(case.workload, seq_len=seq_len, sequences_per_step=(1 << 22) // seq_len)
        best = search(replace(case, workload=workload))
        assert isinstance(best, Ranking)
        assert (best.candidates.cp[0] > 1) == is_cut
    assert context_pays_from(case, most=found.seq_len // 2) is None
    assert context_pays_from(case_of("llama-3.1-8b", "2x8xh100", 1, seq_len=4096)) is None


@given(st.integers(1, 4096), st.integers(1, 10_000))
def test_the_largest_is_within_a_part_in_thirty_two(limit: int, most: int) -> None:
    found = largest(lambda number: number <= limit, 1, most)
    assert found <= min(limit, most)
    assert found >= min(limit, most) - max(found // 32, 1)


def test_what_does_not_start_is_zero() -> None:
    assert largest(lambda number: False, 1, 100) == 0


def test_sizes_are_parts_of_a_server_and_whole_servers() -> None:
    assert sizes(case_of("llama-3.1-8b", "1x8xh100", 64), 64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]


@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b"])
def test_one_size_less_than_the_fewest_does_not_fit(model: str) -> None:
    case = case_of(model, "1x8xh100", 96)
    cards = fewest_cards(case)
    assert cards is not None
    assert fits_at_all(case.on_cards(cards))
    assert not any(fits_at_all(case.on_cards(fewer)) for fewer in sizes(case) if fewer < cards)


def test_fewer_days_need_more_cards() -> None:
    case = case_of("llama-3.1-8b", "1x8xh100", 768)
    slow, _ = cheapest(case, 10**12, 3.0, days=200)
    fast, tried = cheapest(case, 10**12, 3.0, days=30)
    assert slow is not None
    assert fast is not None
    assert fast.cards > slow.cards
    assert fast.cost.days <= 30 < min([each.cost.days for each in tried[:-1]], default=31)
    assert fast.cost.usd == pytest.approx(fast.cost.card_hours * 3.0)


def test_an_impossible_date_has_no_answer() -> None:
    found, _ = cheapest(case_of("llama-3.1-8b", "1x8xh100", 96), 10**13, 3.0, days=0.01)
    assert found is None


def test_the_longest_sequence_and_the_deepest_network_fit_and_more_does_not() -> None:
    case = case_of("llama-3.1-8b", "1x8xh100", 8)
    longest = longest_sequence(case)
    assert longest > 4096
    assert fits_at_all(replace(case, workload=replace(case.workload, seq_len=longest)))
    assert not fits_at_all(
        replace(case, workload=replace(case.workload, seq_len=longest * 17 // 16 // 1024 * 1024 + 1024))
    )
    layers = deepest_network(case)
    assert layers > 32
    assert fits_at_all(replace(case, network=replace(case.network, layers=layers)))


def test_a_faster_network_is_never_slower() -> None:
    ranking = search(case_of("llama-3.1-8b", "4x8xh100", 64), Fixed({"pp": 1}))
    assert isinstance(ranking, Ranking)
    rows = network_speeds(ranking)
    assert [row.best_s for row in rows] == sorted((row.best_s for row in rows), reverse=True)
    assert all(row.best_s <= row.kept_s for row in rows)
    assert rows[0].kept_s > ranking.step_s[0] >= rows[-1].kept_s
    inside = search(case_of("llama-3.1-8b", "1x8xh100", 64))
    assert isinstance(inside, Ranking)
    assert network_speeds(inside) == []
