"""After which steps is the state saved, where the run file leaves it to what a save costs?"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from triax.checkpoint.agree import Ranks
from triax.checkpoint.save import SaveOutcome
from triax.spec.checkpoint_interval import best_interval_s, mean_time_between_failures_s
from triax.spec.run import CheckpointSpec
from triax.units import format_seconds

FIRST_AFTER: Final = 10
"""Steps until the first save of an "auto" run, which measures what a save costs and shows whether one can be made."""
_LEAST_SAVE_S: Final = 1e-3
"""A save costs no less: clocks and the steps beside it are not exact enough to tell."""
_MOST_FELT: Final = 0.01
"""Part of the time that copies to memory may cost."""
_TOLD_FROM: Final = 1.25
"""An interval that changed by less than this factor is not told again."""


@dataclass(frozen=True, slots=True)
class Interval:
    """What decided how many steps lie between two saves; the same on every rank."""

    every_steps: int
    save_s: float
    """For how long a save keeps training waiting."""
    step_s: float
    """Of the slowest rank."""
    why: str

    def describe(self) -> str:
        """Return it in words."""
        return (
            f"every {self.every_steps} steps, about {format_seconds(self.every_steps * self.step_s)}: one costs "
            f"{format_seconds(self.save_s)}, {self.why}"
        )


Rule = Callable[[SaveOutcome], tuple[float, str]]
"""Returns how many seconds should lie between two saves like this one, and why."""


def least_lost(spec: CheckpointSpec, num_servers: int) -> Rule:
    """Return the rule by which saves and failures together cost least time (Young and Daly)."""
    failure_s = mean_time_between_failures_s(num_servers, spec.failures_per_1000_server_days)

    def rule(outcome: SaveOutcome) -> tuple[float, str]:
        best_s = best_interval_s(max(outcome.stall_seconds, _LEAST_SAVE_S), failure_s)
        return best_s, f"and a server is expected to fail every {format_seconds(failure_s)}"

    return rule


def hardly_felt(outcome: SaveOutcome) -> tuple[float, str]:
    """Return after how long the stall of a save is a hundredth of the time."""
    return outcome.stall_seconds / _MOST_FELT, f"which is to be {_MOST_FELT:.0%} of the time at most"


class Cadence:
    """Says when a save is due. All ranks call its methods together and hear the same."""

    def __init__(self, every: int | Literal["auto"], rule: Rule, ranks: Ranks, step: int) -> None:
        """``rule`` is for "auto"; ``step``: where this session begins."""
        self._every, self._rule, self._ranks = every, rule, ranks
        self._step, self._next = step, step + FIRST_AFTER
        self._measured_from, self._began_s = step, time.perf_counter()
        self._interval: Interval | None = None

    def is_due(self, step: int) -> bool:
        """Return whether a save is due after ``step`` steps; called once after each step."""
        self._step = step
        if self._every != "auto":
            return self._every > 0 and step % self._every == 0
        if step < self._next:
            return False
        self._next = step + (FIRST_AFTER if self._interval is None else self._interval.every_steps)
        return True

    def leave_out(self, seconds: float) -> None:
        """Count ``seconds`` of this rank as none of a step's."""
        self._began_s += seconds

    def learn(self, outcome: SaveOutcome) -> Interval | None:
        """Take what a save has cost; return the interval where it is new or has changed enough to tell."""
        if self._every != "auto" or not outcome.ok or self._step <= self._measured_from:
            return None
        now_s = time.perf_counter()
        mine_s = (now_s - self._began_s) / (self._step - self._measured_from)
        step_s = self._ranks.maxima(int(1e9 * mine_s))[0] / 1e9
        self._measured_from, self._began_s = self._step, now_s
        before, self._interval = self._interval, self._best(outcome, max(step_s, 1e-9))
        self._next = max(self._step + 1, outcome.step + self._interval.every_steps)
        if before is not None:
            ratio = self._interval.every_steps / before.every_steps
            if max(ratio, 1 / ratio) < _TOLD_FROM:
                return None
        return self._interval

    def _best(self, outcome: SaveOutcome, step_s: float) -> Interval:
        # One save at a time: the next waits until this one is written.
        best_s, why = self._rule(outcome)
        every_steps = max(math.ceil(max(best_s, outcome.seconds) / step_s), 1)
        return Interval(every_steps, outcome.stall_seconds, step_s, why)
