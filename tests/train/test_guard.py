"""Does the guard find out by trying what was wrong, and stop where trying does not help?"""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.spec.run_files import make_run
from triax.spec.model import ModelSpec
from triax.spec.run import GuardSpec
from triax.train.guard import Case, Guard, GuardState, Judgement, StepReport
from triax.train.spikes import Bounds
from triax.train.state import TrainState

SIZE = 4
MODEL = ModelSpec(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=64)
LIMITS = Bounds(3.0, 2.0)


def report(step: int, loss: float = 2.0, grad_norm: float = 1.0) -> StepReport:
    return StepReport(step, loss, grad_norm, tokens=8, wants_stop=False, bounds=LIMITS)


def judge(step: int, loss: float, state: GuardState, grad_norm: float = 1.0, **guard: object) -> Judgement:
    spec = GuardSpec.model_validate(guard)
    return Guard(spec, MODEL, SIZE).judge(report(step, loss, grad_norm), state, step * SIZE)


def verdicts(losses: list[float], step: int = 9, grad_norm: float = 1.0, **guard: object) -> list[str]:
    """Verdicts on attempts of one step that come to these losses, one after the other."""
    state, found = GuardState(), []
    for loss in losses:
        judgement = judge(step, loss, state, grad_norm if loss > 2.0 or grad_norm > 2.0 else 1.0, **guard)
        state = judgement.state
        found.append(judgement.verdict + (f" {judgement.cause}" if judgement.cause else ""))
        if judgement.verdict == "stop":
            break
    return found


@pytest.mark.parametrize("bad", [9.0, math.nan, math.inf])
def test_the_cheapest_is_tried_first(bad: float) -> None:
    assert verdicts([bad, 2.0]) == ["repeat", "commit hardware"]
    assert verdicts([bad, bad, 2.0]) == ["repeat", "skip", "commit data"]
    assert verdicts([*[bad] * 4, 2.0]) == ["repeat", *["skip"] * 3, "commit data"]
    assert verdicts([*[bad] * 5, 2.0]) == ["repeat", *["skip"] * 3, "rollback", "commit hardware"]
    assert verdicts([*[bad] * 6, 2.0]) == ["repeat", *["skip"] * 3, "rollback", "rollback", "commit data"]
    assert verdicts([bad] * 99, max_rollbacks=3) == ["repeat", *["skip"] * 3, *["rollback"] * 3, "stop"]


def test_patience_ends_by_going_back_or_by_stopping() -> None:
    assert verdicts([9.0] * 99, on_spike="skip", max_skipped_in_a_row=7) == ["repeat", *["skip"] * 5, "stop"]
    assert verdicts([9.0] * 99, max_skipped_in_a_row=2, max_rollbacks=1) == ["repeat", "rollback", "stop"]
    assert verdicts([9.0] * 99, on_spike="stop") == ["stop"]
    assert verdicts([math.nan] * 99, on_spike="stop", max_skipped_in_a_row=3) == ["repeat", "skip", "stop"]


def test_a_first_replay_leaves_nothing_out_and_later_ones_reach_farther_back() -> None:
    state, wishes = GuardState(), []
    for _ in range(8):
        judgement = judge(20, 9.0, state)
        state = judgement.state
        wishes.append(judgement.rollback)
    found = [(wish.at_most, wish.skip) for wish in wishes if wish is not None]
    assert found == [(19, None), (18, (76, 84)), (16, (68, 84)), (12, (52, 84))]


def test_the_learning_rate_is_cut_only_where_going_back_alone_did_not_help() -> None:
    state, cuts = GuardState(), []
    for _ in range(6):
        judgement = judge(20, 9.0, state, learning_rate_cut=0.5)
        state = judgement.state
        cuts.append(judgement.rollback is not None and judgement.rollback.cuts_learning_rate)
    assert cuts == [False] * 5 + [True]


def test_norms_that_stay_high_over_other_samples_are_a_new_level() -> None:
    assert verdicts([2.0, 2.0, 2.0], grad_norm=5.0) == ["repeat", "skip", "accept"]
    state = GuardState(losses=(2.0,), grad_norms=(1.0,), case=Case(9, 36, "skip"))
    accepted = judge(9, 2.0, state, grad_norm=5.0)
    assert (accepted.state.grad_norms, accepted.state.losses, accepted.state.case) == ((), (2.0,), None)


def test_a_replay_goes_on_until_the_step_that_spiked() -> None:
    case = Case(12, 48, "replay", 1)
    state = GuardState(case=case, rollbacks=1, rolled_back_at=12)
    for step in range(8, 12):
        judgement = judge(step, 2.0, state)
        state = judgement.state
        assert (judgement.verdict, judgement.cause, state.case) == ("commit", "", case)
    assert judge(12, 2.0, state).cause == "hardware"
    assert judge(12, 9.0, state).verdict == "rollback"


def test_rollbacks_are_forgiven_after_a_window_that_went_well() -> None:
    state = GuardState(rollbacks=5, rolled_back_at=100)
    assert judge(100 + 127, 2.0, state).state.rollbacks == 5
    assert judge(100 + 128, 2.0, state).state.rollbacks == 0


def test_a_warning_changes_nothing() -> None:
    guard = Guard(GuardSpec(on_spike="warn", window=16), MODEL, SIZE)
    state = GuardState(losses=(2.0,) * 40, grad_norms=(1.0,) * 40)
    limits = guard.limits(state, newest_is_unread=False)
    assert limits == Bounds()
    judgement = guard.judge(replace(report(40, 9.0), bounds=limits), state, 160)
    assert (judgement.verdict, judgement.state.losses[-1]) == ("commit", 9.0)
    assert "the loss is a spike (at most 2.2 was to be expected). Training goes on." in judgement.reason


@pytest.mark.parametrize("known", [5, 12, 19, 20, 21, 30])
def test_a_host_that_reads_late_holds_steps_to_the_same_bounds(known: int) -> None:
    """A step's bounds come from those up to the last but one: that one may not have been read when it is enqueued."""
    guard, state, size = Guard(GuardSpec(window=16), MODEL, SIZE), GuardState(), SIZE
    for step in range(known):
        late = guard.limits(state, newest_is_unread=True)
        loss, norm = 2.0 + math.sin(step) / 9, 1.0 + math.cos(step) / 9
        state = guard.judge(replace(report(step, loss, norm), bounds=Bounds()), state, step * size).state
        assert guard.limits(state, newest_is_unread=False) == late


def test_a_run_with_weights_that_differ_goes_back_as_often_as_it_may() -> None:
    guard = Guard(GuardSpec(max_rollbacks=1), MODEL, SIZE)
    first = guard.go_back_from("ranks disagree.", 7, GuardState())
    assert (first.verdict, first.rollback and first.rollback.at_most) == ("rollback", 7)
    assert guard.go_back_from("ranks disagree.", 7, first.state).verdict == "stop"


RANGES = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), max_size=6)


@given(RANGES, st.integers(0, 30))
def test_a_run_reads_every_sample_but_those_it_passes_over(ranges: list[tuple[int, int]], begin: int) -> None:
    run = make_run(train={"sequences_per_step": SIZE})
    skipped = {step for first, steps in ranges for step in range(first, first + steps)}
    state = TrainState(next_sample=begin * SIZE)
    for first, steps in ranges:
        state = state.passing_over((first * SIZE, (first + steps) * SIZE))
    assert all(stop < other for (_, stop), (other, _) in zip(state.skipped, state.skipped[1:], strict=False))
    read = []
    for _ in range(12):
        read.append(state.next_sample // SIZE)
        state = state.after_step(run)
    assert read == [step for step in range(begin, begin + 99) if step not in skipped][:12]


@given(RANGES, st.tuples(st.integers(0, 20), st.integers(1, 5)))
def test_samples_can_be_read_again(ranges: list[tuple[int, int]], again: tuple[int, int]) -> None:
    state = TrainState(next_sample=10**6)
    for first, steps in ranges:
        state = state.passing_over((first, first + steps))
    state = state.reading_again((again[0], sum(again)))
    left = {sample for first, stop in state.skipped for sample in range(first, stop)}
    passed = {sample for first, steps in ranges for sample in range(first, first + steps)}
    assert left == passed - set(range(again[0], sum(again)))
