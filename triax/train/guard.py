"""Can these numbers be right, and what happens when they cannot?

A judgement is a pure function of numbers that are the same on every rank and of what the run's state remembers, so
every rank reaches the same verdict, and a resumed run the one that it would have reached.

A step whose loss or gradient norm is a spike (``triax.train.spikes``) or is not finite was left out on the device: the
weights are those before it. What is wrong then is found out by trying, the cheapest first:

1. *repeat*: the same samples on the same weights. No spike now: a fault of the hardware that came and went.
2. *skip*: the next samples on the same weights, up to three times. No spike now: the data. The run passes over these
   samples for good.
3. *rollback*: the weights are bad. Go back to a checkpoint before, and train the same steps again, leaving out nothing.
   No spike now: a fault of the hardware that had changed the weights.
4. *rollback* again, and pass over the samples of the spike and of the step before it: the data, or the run itself. The
   next time of twice as many steps, and so on; each of these may cut the learning rate.
5. *stop*, once it has gone back as often as it may.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from triax.spec.model import ModelSpec
from triax.spec.run import GuardSpec
from triax.train.spikes import NO_BOUNDS, Bounds, bounds, history_of
from triax.watch.experts import LayerLoad

Verdict = Literal["commit", "repeat", "skip", "accept", "rollback", "stop"]
"""commit: the step stands. All others: it was left out, and is tried again on the same samples (repeat, accept), on the
next ones (skip), or after going back. accept: gradient norms have a new level."""

Trial = Literal["repeat", "skip", "replay"]

Cause = Literal["", "hardware", "data"]

_SKIPS: Final = 3
"""Steps of other samples that are tried before the weights are called bad: each costs a step, and going back many."""

Samples = tuple[int, int]
"""Numbers of the first sample and of the one after the last."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step came to, identical on every rank."""

    step: int
    loss: float
    grad_norm: float
    tokens: int
    """Tokens that counted."""
    wants_stop: bool
    """True where any rank was asked to stop."""
    experts: Sequence[LayerLoad] = ()
    """What each layer with experts saw."""
    bounds: Bounds = NO_BOUNDS
    """What the device was told to leave the update out for."""

    @property
    def is_finite(self) -> bool:
        """Whether both numbers are."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def stands(self) -> bool:
        """False where the update was left out on the device: its test is this one, on the same numbers."""
        return self.is_finite and self.is_within(self.bounds)

    def is_within(self, limits: Bounds) -> bool:
        """Return whether neither number is larger than it may be."""
        return self.loss <= limits.loss and self.grad_norm <= limits.grad_norm


@dataclass(frozen=True, slots=True)
class Case:
    """A spike whose cause is not known yet."""

    step: int
    first_sample: int
    trial: Trial
    """What is being tried."""
    replays: int = 0
    """How often the run went back for it."""


@dataclass(frozen=True, slots=True)
class GuardState:
    """What the guard remembers; a part of the run's state."""

    losses: tuple[float, ...] = ()
    """Of the last steps that stand, oldest first."""
    grad_norms: tuple[float, ...] = ()
    left_out: int = 0
    """Attempts left out since the last step that stands."""
    rollbacks: int = 0
    rolled_back_at: int = 0
    """The step at which the run last went back."""
    case: Case | None = None


@dataclass(frozen=True, slots=True)
class Rollback:
    """Where to go back to, and what to pass over from then on."""

    at_most: int
    """The checkpoint is of no later step: those after it may hold bad weights."""
    skip: Samples | None = None
    cuts_learning_rate: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and its reason; a reason is empty where all is well."""

    verdict: Verdict
    reason: str = ""
    state: GuardState = GuardState()
    """What the guard remembers from now on."""
    cause: Cause = ""
    """What a case has turned out to be that is closed by this step."""
    rollback: Rollback | None = None


class Guard:
    """Judges each step of a run; it has no memory of its own."""

    def __init__(self, spec: GuardSpec, model: ModelSpec, sequences_per_step: int) -> None:
        self._spec = spec
        self._vocab_size = model.vocab_size
        self._sequences_per_step = sequences_per_step

    def limits(self, state: GuardState, *, newest_is_unread: bool) -> Bounds:
        """Return what the coming step is held to, on the device already.

        The step right before it does not count: its numbers may not be known yet where the host reads late. So the
        bounds are the same whether it is read (and part of ``state``) or not.
        """
        if self._spec.on_spike == "warn":
            return NO_BOUNDS
        return self._bounds(state) if not newest_is_unread else bounds(state.losses, state.grad_norms, self._spec)

    def _bounds(self, state: GuardState) -> Bounds:
        return bounds(state.losses[:-1], state.grad_norms[:-1], self._spec)

    def judge(self, report: StepReport, state: GuardState, first_sample: int) -> Judgement:
        """Return what is done with a step that read the samples from ``first_sample`` on."""
        if report.stands:
            return self._committed(report, state, first_sample)
        state = replace(state, left_out=state.left_out + 1)
        what = _describe(report)
        case = state.case
        if report.is_finite and self._spec.on_spike == "stop":
            return Judgement("stop", f"{what} The weights are those before it (guard.on_spike = stop).", state)
        if case is None or case.step != report.step:
            case = Case(report.step, first_sample, "repeat", 0 if case is None else case.replays)
            return Judgement("repeat", f"{what} The same samples are tried again.", replace(state, case=case))
        goes_back = self._spec.on_spike == "rollback"
        if case.trial == "skip" and report.is_finite and report.loss <= report.bounds.loss:
            fresh = replace(state, grad_norms=(), losses=state.losses, case=None)
            reason = f"{what} Other samples come to the like and the loss is as before: that is the new level of norms."
            return Judgement("accept", reason, fresh)
        is_patient = state.left_out < self._spec.max_skipped_in_a_row
        if not is_patient and not goes_back:
            return self._stop(f"{what} That were {state.left_out} attempts in a row", state)
        if case.trial != "replay" and is_patient and (state.left_out <= 1 + _SKIPS or not goes_back):
            samples = f"samples {first_sample} to {self._last(first_sample)}"
            reason = f"{what} It is no fault of hardware that came and went: the run tries without {samples}."
            return Judgement("skip", reason, replace(state, case=replace(case, trial="skip")))
        return self._go_back(what, state, case, first_sample)

    def _committed(self, report: StepReport, state: GuardState, first_sample: int) -> Judgement:
        limits = self._bounds(state) if self._spec.on_spike == "warn" else NO_BOUNDS
        reason = "" if report.is_within(limits) else f"{_describe(replace(report, bounds=limits))} Training goes on."
        kept = history_of(self._spec)
        rollbacks = state.rollbacks if report.step < state.rolled_back_at + self._spec.window else 0
        state = replace(
            state,
            losses=(*state.losses, report.loss)[-kept:],
            grad_norms=(*state.grad_norms, report.grad_norm)[-kept:],
            left_out=0,
            rollbacks=rollbacks,
        )
        case = state.case
        cause: Cause = ""
        if case is not None and report.step >= case.step:
            # The first replay leaves nothing out: what it does not show again was no fault of the data.
            cause = "data" if case.trial == "skip" or case.replays > 1 else "hardware"
            last = first_sample - 1 if case.trial == "skip" else self._last(case.first_sample)
            reason = _finding(case, cause, last)
            state = replace(state, case=None)
        return Judgement("commit", reason, state, cause)

    def _go_back(self, what: str, state: GuardState, case: Case, first_sample: int) -> Judgement:
        if state.rollbacks >= self._spec.max_rollbacks:
            return self._stop(f"{what} The run went back {state.rollbacks} times, with and without its samples", state)
        state = replace(
            state,
            left_out=0,
            rollbacks=state.rollbacks + 1,
            rolled_back_at=case.step,
            case=replace(case, trial="replay", replays=case.replays + 1),
        )
        if case.replays == 0:
            reason = f"{what} Other samples are no better: the weights are bad. The steps before it are trained again."
            return Judgement("rollback", reason, state, rollback=Rollback(case.step - 1))
        reach = min(2**case.replays, case.step + 1)
        first = max(case.first_sample - (reach - 1) * self._sequences_per_step, 0)
        skip = (first, self._last(max(case.first_sample, first_sample)) + 1)
        reason = (
            f"{what} The same steps came to it again, so it is no fault of hardware that came and went: the run goes "
            f"back and passes over samples {first} to {skip[1] - 1}."
        )
        cuts = self._spec.learning_rate_cut < 1
        return Judgement("rollback", reason, state, rollback=Rollback(max(case.step - reach, 0), skip, cuts))

    def go_back_from(self, what: str, step: int, state: GuardState) -> Judgement:
        """Return the verdict on weights found bad after ``step`` steps, for the reason ``what``, a sentence."""
        if state.rollbacks >= self._spec.max_rollbacks:
            return self._stop(f"{what} The run went back {state.rollbacks} times", state)
        state = replace(state, rollbacks=state.rollbacks + 1, rolled_back_at=step, case=None)
        return Judgement("rollback", what, state, rollback=Rollback(step))

    def _stop(self, what: str, state: GuardState) -> Judgement:
        return Judgement(
            "stop",
            f"{what}, and the run stops. The weights are those of the last good step. Lower learning_rate.peak, look "
            f"at the data of these steps, or set guard.on_spike = warn if this is meant.",
            state,
        )

    def _last(self, first_sample: int) -> int:
        return first_sample + self._sequences_per_step - 1

    def judge_guess(self, loss: float) -> Judgement:
        """Return whether random weights guess as they must: their loss against random labels is ln(V).

        A wrong scale of the loss (a mean of means, a factor of the number of ranks) or of the weights shows here.
        """
        expected = math.log(self._vocab_size)
        if abs(loss - expected) <= self._spec.initial_loss_tolerance * expected:
            return Judgement("commit")
        return Judgement(
            "stop",
            f"random weights guess with a loss of {loss:.4f}, and it must be about ln({self._vocab_size}) = "
            f"{expected:.4f} (within {self._spec.initial_loss_tolerance:.0%}): check model.initializer_range, or set "
            f"guard.check_initial_loss = false if this is meant.",
        )


def _describe(report: StepReport) -> str:
    what = f"step {report.step + 1}: loss {report.loss:.6g}, gradient norm {report.grad_norm:.6g}"
    if not report.is_finite:
        return f"{what}: not finite."
    over = [
        f"{name} is a spike (at most {limit:.6g} was to be expected)"
        for name, value, limit in (
            ("the loss", report.loss, report.bounds.loss),
            ("the norm", report.grad_norm, report.bounds.grad_norm),
        )
        if value > limit
    ]
    return f"{what}: {' and '.join(over)}."


def _finding(case: Case, cause: Cause, last_sample: int) -> str:
    """Return what a case has turned out to be."""
    step = f"step {case.step + 1}"
    if cause == "hardware":
        tried = "the same steps from a checkpoint" if case.replays else "the same samples again"
        return f"{step} is as expected now, from {tried}: it was a fault of hardware that came and went, and is undone."
    samples = f"samples {case.first_sample} to {last_sample}"
    more = ", and those of the steps before them" if case.replays > 1 else ""
    return f"{step} is as expected now, without {samples}{more}: it was the data, which the run passes over."
