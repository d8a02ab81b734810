"""Are the values offered to a user the nearest legal ones?"""

from hypothesis import given
from hypothesis import strategies as st

from triax.spec.legal_values import divisors, either, multiples, nearest


@given(st.integers(1, 5000))
def test_divisors_are_all_there(number: int) -> None:
    assert divisors(number) == [candidate for candidate in range(1, number + 1) if number % candidate == 0]


@given(st.integers(1, 1000), st.integers(0, 10**6))
def test_multiples_stand_on_both_sides(unit: int, wanted: int) -> None:
    found = multiples(unit, wanted)
    assert all(multiple > 0 and multiple % unit == 0 for multiple in found)
    assert found[-1] > wanted
    assert all(abs(multiple - wanted) <= unit for multiple in found)
    assert len(found) == (2 if wanted >= unit else 1)


@given(st.sets(st.integers(1, 100), min_size=1), st.integers(0, 101))
def test_nearest_takes_two_below_and_one_above(values: set[int], wanted: int) -> None:
    ascending = sorted(values)
    found = nearest(ascending, wanted)
    assert found == sorted(found)
    assert set(found) <= values
    assert min(values, key=lambda value: abs(value - wanted)) in found or any(
        abs(value - wanted) == min(abs(other - wanted) for other in values) for value in found
    )
    assert sum(value <= wanted for value in found) == min(2, sum(value <= wanted for value in values))
    assert sum(value > wanted for value in found) == min(1, sum(value > wanted for value in values))


def test_a_list_reads_as_a_sentence() -> None:
    assert [either([1]), either([1, 2]), either(["a", "b", "c"])] == ["1", "1 or 2", "a, b or c"]
