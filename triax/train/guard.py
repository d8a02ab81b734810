"""Can these numbers be right, and what happens when they cannot?

A judgement is made from numbers that are the same on every rank, so every rank reaches the same verdict.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from triax.spec.model import ModelSpec
from triax.spec.run import GuardSpec
from triax.watch.experts import LayerLoad

Verdict = Literal["commit", "skip", "stop"]


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

    @property
    def is_finite(self) -> bool:
        """False where the update was left out on the device."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and its reason; a reason is empty where all is well."""

    verdict: Verdict
    reason: str = ""


class Guard:
    """Judges each step; remembers how many were skipped in a row."""

    def __init__(self, spec: GuardSpec, model: ModelSpec) -> None:
        self._spec = spec
        self._vocab_size = model.vocab_size
        self.skipped_in_a_row = 0

    def judge(self, report: StepReport) -> Judgement:
        """Return whether the step's update stands, was skipped, or the run must stop."""
        if not report.is_finite:
            self.skipped_in_a_row += 1
            what = f"step {report.step}: loss {report.loss}, gradient norm {report.grad_norm}"
            if self.skipped_in_a_row >= self._spec.max_skipped_in_a_row:
                return Judgement(
                    "stop",
                    f"{what}: not finite for {self.skipped_in_a_row} steps in a row; the weights are those of the last "
                    f"good step. Lower learning_rate.peak or look at the data of these steps.",
                )
            return Judgement("skip", f"{what}: not finite, the update was left out.")
        self.skipped_in_a_row = 0
        return Judgement("commit")

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
