"""Does the cover hold every pair that can be, and none that cannot?"""

from hypothesis import given
from hypothesis import strategies as st

from tests.harness.pairwise import all_pairs, pairs_of, pairwise_cover

FREE = {"a": [1, 2, 3], "b": ["x", "y"], "c": [True, False]}


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1))
def test_every_pair_that_can_meet_meets_and_no_other(legal: set[tuple[int, int]]) -> None:
    legal |= {(1, q) for _, q in legal}  # so that each q can be without p=0
    bound = [{"p": p, "q": q} for p, q in sorted(legal)]
    never = {(("b", "x"), ("a", 3)), (("p", 0), ("a", 1))}
    cover = pairwise_cover(bound, FREE, never)
    met = {pair for setting in cover for pair in pairs_of(setting)}
    assert met == all_pairs(bound, FREE, never)
    assert met.isdisjoint({(("a", 3), ("b", "x")), (("a", 1), ("p", 0))})
    assert all({"p": setting["p"], "q": setting["q"]} in bound for setting in cover)
    assert cover == pairwise_cover(bound, FREE, never)


def test_a_cover_is_much_smaller_than_all_settings() -> None:
    assert len(pairwise_cover([{"p": p} for p in range(3)], FREE)) <= 12 < 3 * 3 * 2 * 2
