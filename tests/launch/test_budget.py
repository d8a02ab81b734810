"""Does a run start again as often as it should, at the right pace, and no more where it gains nothing?"""

from hypothesis import given
from hypothesis import strategies as st

from triax.launch.budget import Budget, GivenUp, Restart


def budget(max_restarts: int = 20, same_fault: int = 2) -> Budget:
    return Budget(max_restarts, same_fault, backoff_s=1.0, max_backoff_s=60.0)


def test_pauses_double_up_to_the_longest() -> None:
    judged = budget()
    waits = [judged.judge(step, "was killed", 0) for step in range(9)]
    assert waits == [Restart(n + 1, wait) for n, wait in enumerate((0, 1, 2, 4, 8, 16, 32, 60, 60))]


def test_a_checkpoint_gained_begins_anew() -> None:
    judged = budget()
    assert judged.judge(3, "was killed", 0) == Restart(1, 0.0)
    assert judged.judge(5, "was killed", 0) == Restart(2, 1.0)
    assert judged.judge(5, "was killed", 4) == Restart(1, 0.0)


def test_a_fault_that_comes_back_is_not_tried_again() -> None:
    judged = budget()
    assert judged.judge(7, "ValueError: seven", 4) == Restart(1, 0.0)
    given_up = judged.judge(7, "ValueError: seven", 4)
    assert isinstance(given_up, GivenUp)
    assert "2 times in a row at step 7 with no checkpoint gained" in given_up.reason


def test_another_way_or_another_step_is_another_fault() -> None:
    judged = budget()
    for step, how in ((7, "a"), (7, "b"), (8, "b"), (None, "b"), (7, "a")):
        assert isinstance(judged.judge(step, how, 4), Restart)


def test_no_restarts_at_all() -> None:
    assert budget(max_restarts=0).judge(1, "was killed", 0) == GivenUp("")


@given(
    st.integers(1, 8), st.integers(2, 4),
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from("ab"), st.integers(0, 1)), max_size=60),
)  # fmt: skip
def test_it_ends_where_nothing_is_gained(
    max_restarts: int, same_fault: int, faults: list[tuple[int, str, int]]
) -> None:
    """Whatever happens, no more than the limit of restarts follow each other without a checkpoint."""
    judged, saved, in_a_row = budget(max_restarts, same_fault), 0, 0
    for step, how, gained in faults:
        saved += gained
        in_a_row = 0 if gained else in_a_row
        verdict = judged.judge(step, how, saved)
        if isinstance(verdict, GivenUp):
            return
        in_a_row += 1
        assert verdict.number <= max_restarts
        assert in_a_row <= max_restarts + 1
