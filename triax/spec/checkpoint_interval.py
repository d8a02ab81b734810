"""How often should a run save its state, when machines fail now and then?

A save costs time; so does the work lost since the last one. Planner and trainer use the same formula.
"""

import math
from typing import Final

FAILURES_PER_1000_SERVER_DAYS: Final = 3.8
"""Unexpected interruptions of a job: 419 in 54 days of 2,048 servers (arXiv:2407.21783, section 3.3.4)."""


def mean_time_between_failures_s(servers: int, failures_per_1000_server_days: float) -> float:
    """Return the seconds between two failures anywhere among ``servers``, which fail independently."""
    return 86_400.0 * 1000.0 / (failures_per_1000_server_days * servers)


def best_interval_s(save_s: float, failure_s: float) -> float:
    """Return the seconds of work between two saves that lose least time.

    ``save_s`` is how long a save stops the work, ``failure_s`` the mean time between failures. Young (1974,
    doi:10.1145/361147.361115) found sqrt(2 x save x mean); Daly (2006, doi:10.1016/j.future.2004.11.016, equation 37)
    the higher orders, and that a save as long as half the mean time is best made as often as machines fail.
    """
    if save_s <= 0 or failure_s <= 0:
        raise ValueError(f"a save of {save_s} s and a failure every {failure_s} s have no interval")
    if save_s >= failure_s / 2:
        return failure_s
    ratio = save_s / (2 * failure_s)
    return math.sqrt(2 * save_s * failure_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def useful_fraction(interval_s: float, save_s: float, restart_s: float, failure_s: float) -> float:
    """Return which part of the time goes into work that counts (Daly 2006, equation 20), between 0 and 1.

    Failures come at random at a mean distance of ``failure_s``, also while the run restarts; each costs ``restart_s``
    and the work since the last save.
    """
    exponent = (interval_s + save_s) / failure_s
    if exponent + restart_s / failure_s > 700:
        return 0.0
    whole = failure_s * math.exp(restart_s / failure_s) * math.expm1(exponent)
    return min(interval_s / whole, 1.0)
