"""Is another restart worth it? Not where the last ones have gained nothing, and not where a fault comes back."""

from dataclasses import dataclass, replace
from typing import Final

_MOST_DOUBLINGS: Final = 32


@dataclass(frozen=True, slots=True)
class Restart:
    """The ranks start again."""

    number: int
    """How many in a row have not gained a checkpoint, this one included."""
    wait_s: float
    """Before it, so that what others are mending has time."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The run ends, and why in a sentence; empty where no restarts were wanted."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tally:
    """What has failed since the last checkpoint was gained."""

    saved_step: int = -1
    restarts: int = 0
    repeated: int = 0
    """How often the last failure came, in a row."""
    step: int | None = None
    how: str = ""


class Budget:
    """Counts failures that have gained nothing: no checkpoint newer than the one before."""

    def __init__(self, max_restarts: int, same_fault: int, backoff_s: float, max_backoff_s: float) -> None:
        """Restart at most ``max_restarts`` times in a row, and end at the ``same_fault``-th failure in a row that is
        the same. The first restart comes at once, the second after ``backoff_s``, each one after twice the time."""
        self._max_restarts, self._same_fault = max_restarts, same_fault
        self._backoff_s, self._max_backoff_s = backoff_s, max_backoff_s
        self.tally = Tally()
        """All that the next verdict depends on; who takes over from another agent sets it."""

    def judge(self, step: int | None, how: str, saved_step: int) -> Restart | GivenUp:
        """Return what follows on a failure during ``step`` (None: outside of steps), in the words ``how``, where the
        newest checkpoint is of ``saved_step``."""
        before = self.tally if saved_step <= self.tally.saved_step else Tally(saved_step)
        is_same = before.repeated > 0 and (before.step, before.how) == (step, how)
        repeated = before.repeated + 1 if is_same else 1
        self.tally = replace(before, repeated=repeated, step=step, how=how)
        if self._max_restarts == 0:
            return GivenUp("")
        where = "at the same place" if step is None else f"at step {step}"
        if repeated >= self._same_fault:
            return GivenUp(
                f"This has happened {repeated} times in a row {where} with no checkpoint gained between, so another "
                f"restart would not help."
            )
        if before.restarts >= self._max_restarts:
            return GivenUp(f"{before.restarts} restarts in a row have gained no checkpoint, and this is the limit.")
        number = before.restarts + 1
        self.tally = replace(self.tally, restarts=number)
        return Restart(number, self._wait_s(number))

    def _wait_s(self, number: int) -> float:
        if number == 1:
            return 0.0
        doubled: float = self._backoff_s * 2.0 ** min(number - 2, _MOST_DOUBLINGS)
        return min(doubled, self._max_backoff_s)
