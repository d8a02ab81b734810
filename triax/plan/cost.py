"""What does a run cost to its end: hours, money, energy?"""

from dataclasses import dataclass

from triax.plan.case import Case
from triax.plan.catalogue import energy


@dataclass(frozen=True, slots=True)
class Cost:
    """A run of some tokens on all cards of a machine."""

    tokens: int
    steps: float
    hours: float
    """From start to end, failures and saves included."""
    card_hours: float
    usd: float
    kwh: float
    """Of cards, servers and cooling."""

    @property
    def usd_per_million_tokens(self) -> float:
        """Money for a million trained tokens."""
        return self.usd / self.tokens * 1e6

    @property
    def days(self) -> float:
        """Days from start to end."""
        return self.hours / 24


def cost(case: Case, step_s: float, tokens: int, usd_per_card_hour: float, useful: float = 1.0) -> Cost:
    """Return the cost of training on ``tokens`` in steps of ``step_s``, of which the part ``useful`` counts."""
    overhead, load, _ = energy()
    steps = tokens / case.workload.tokens_per_step
    hours = steps * step_s / max(useful, 1e-9) / 3600
    card_hours = hours * case.machine.cards
    kwh = card_hours * case.machine.card.power_w / 1000 * load * overhead
    return Cost(tokens, steps, hours, card_hours, card_hours * usd_per_card_hour, kwh)
