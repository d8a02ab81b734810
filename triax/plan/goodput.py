"""Which part of the time does a run make progress, when servers fail and state must be saved?"""

from dataclasses import dataclass
from typing import Final

from triax.plan.case import Case
from triax.spec.checkpoint_interval import (
    FAILURES_PER_1000_SERVER_DAYS,
    best_interval_s,
    mean_time_between_failures_s,
    useful_fraction,
)

STATE_BYTES_PER_WEIGHT: Final = 12.0
"""Master weights and two moments in fp32."""
STORAGE_BYTES_PER_S: Final = 2e9
"""Of one server, from shared storage (*assumed*)."""
DETECT_S: Final = 120.0
"""Until a lost server is noticed and its job ended (*assumed*)."""
START_S: Final = 180.0
"""A new server, processes, libraries, compilation (*assumed*)."""
START_EACH_CARD_S: Final = 0.01
"""More for each card: groups are made one after another (*assumed*)."""
SAVE_S: Final = 1.0
"""Of a save whatever its size (*assumed*)."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """What failures and saves cost."""

    failure_s: float
    """Mean time between failures of the job."""
    save_s: float
    """How long one save stops the work: state goes to the server's memory and is written from there."""
    interval_s: float
    """Work between two saves."""
    restart_s: float
    fraction: float
    """Of the time, in steps that count."""


def goodput(case: Case, failures_per_1000_server_days: float = FAILURES_PER_1000_SERVER_DAYS) -> Goodput:
    """Return the part of the time that a run of ``case`` makes progress, saving as often as is best."""
    machine = case.machine
    failure_s = mean_time_between_failures_s(machine.servers, failures_per_1000_server_days)
    state = case.network.parameters * STATE_BYTES_PER_WEIGHT
    save_s = SAVE_S + state / machine.cards / machine.card.host_bytes_per_s
    load_s = state / machine.servers / STORAGE_BYTES_PER_S
    restart_s = DETECT_S + START_S + START_EACH_CARD_S * machine.cards + load_s
    interval_s = best_interval_s(save_s, failure_s)
    return Goodput(failure_s, save_s, interval_s, restart_s, useful_fraction(interval_s, save_s, restart_s, failure_s))
