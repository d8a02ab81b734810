"""How much of the time does a run on 16,384 cards make progress: by the planner's formula, and event by event?

    python -m benchmarks.goodput [--costs FILE ...] [--servers 2048] [--interruptions 419 --days 54] [--json FILE]

The run is that of Llama 3 405B (Dubey et al. 2024, arXiv:2407.21783): 419 unexpected interruptions in 54 days of 2,048
servers with 8 cards each (section 3.3.4 and table 5), of which "higher than 90%" was effective training time. What a
save and a restart cost is what the planner assumes for that run, or what was measured: JSON objects with any of
``step_s``, ``stall_s``, ``write_s``, ``restart_s`` and ``load_s``, each on its own or as the field ``costs`` of the
figures that ``benchmarks.checkpoint`` and ``benchmarks.restart`` write with ``--json FILE``.

A small machine says something of a large one only through its rates. Where a file tells the ``bytes_per_rank`` of the
state that it saved, its seconds are those of as many bytes, and the run's cards have others. Where it tells how many
``restart_ranks`` it restarted, what grows with ranks, and noticing that a server is lost, come on top as assumed.

The simulation knows what the formula leaves out: steps are whole; a state is safe only when it is written, which takes
``write_s`` behind the training, one state at a time; failures come at random, also while a state is saved and while the
run restarts. Chance is drawn from a seed, so every figure comes out the same again.
"""

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.output import write_json
from triax.plan.ask import Wish, ask
from triax.plan.goodput import START_EACH_CARD_S, STATE_BYTES_PER_WEIGHT, goodput
from triax.spec.checkpoint_interval import best_interval_s, mean_time_between_failures_s, useful_fraction
from triax.spec.run import RecoverSpec

MODEL = "llama-3.1-405b"
STEP_S = 6.2
"""6 x 405e9 weights x 16.8 M tokens at the published 400 TFLOP/s of each of 16,384 cards (table 4)."""
WRITE_S = 60.0
"""Until a state is on the disk (*assumed*)."""
ALLOWED = 0.03
"""Part of the simulated goodput that the formula may be off."""
FACTORS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
"""Other intervals that are tried, as multiples of the chosen one."""
SEEDS = (1, 2, 3)
LOST_SERVER_S = RecoverSpec().lost_after_s + 2.0
"""Until a server is missed that is gone, and the others agree (``triax.launch.members``)."""
OF_BYTES = {"stall_s", "write_s", "load_s"}
MEASURABLE = {"step_s", "stall_s", "write_s", "restart_s", "load_s"}


@dataclass(frozen=True)
class Costs:
    """What a step, a save and a failure take, in seconds."""

    step_s: float
    stall_s: float
    """Of a save, in which no step runs."""
    write_s: float
    """From the end of the stall until the state is safe."""
    restart_s: float
    """From a failure to the first step of the run that goes on, without the steps that are done again."""


@dataclass(frozen=True)
class Simulated:
    """What happened in a simulated run."""

    goodput: float
    """Part of the time that went into steps which counted in the end."""
    failures: int
    days: float
    lost_s: float
    """Mean time of steps that were done again, for each failure of a run that was training."""
    cut_restarts: int
    """Failures while the run restarted."""


class _Clock:
    """Time, and failures that come at a mean distance, whatever happens meanwhile."""

    def __init__(self, failure_s: float, seed: int) -> None:
        self._dice, self._failure_s = random.Random(seed), failure_s
        self.now_s, self.failures = 0.0, 0
        self._next_s = self._dice.expovariate(1 / failure_s)

    def passes(self, seconds: float) -> bool:
        """Let ``seconds`` go by and return True, or go to the next failure and return False if that comes before."""
        if self._next_s > self.now_s + seconds:
            self.now_s += seconds
            return True
        self.now_s = self._next_s
        self.failures += 1
        self._next_s += self._dice.expovariate(1 / self._failure_s)
        return False


def simulate(costs: Costs, interval_s: float, failure_s: float, *, failures: int, seed: int) -> Simulated:
    """Run until ``failures`` have happened, saving after each ``interval_s`` of steps (at least one)."""
    work_s = max(round(interval_s / costs.step_s), 1) * costs.step_s
    clock = _Clock(failure_s, seed)
    safe_s = lost_s = 0.0
    cut_restarts = 0
    while clock.failures < failures:
        done_s = behind_s = safe_s
        written_at_s = clock.now_s  # the state that is being written behind the training, of `behind_s`
        while True:
            began_s = clock.now_s
            went_on = clock.passes(work_s)
            done_s += clock.now_s - began_s
            if not went_on:
                break
            if not clock.passes(max(written_at_s - clock.now_s, 0.0) + costs.stall_s):
                break
            safe_s, behind_s, written_at_s = behind_s, done_s, clock.now_s + costs.write_s
        if written_at_s <= clock.now_s:
            safe_s = behind_s
        lost_s += done_s - safe_s
        while not clock.passes(costs.restart_s):
            cut_restarts += 1
    trained = max(clock.failures - cut_restarts, 1)
    return Simulated(safe_s / clock.now_s, clock.failures, clock.now_s / 86_400, lost_s / trained, cut_restarts)


def row(costs: Costs, failure_s: float, *, failures: int, seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """Return the formula's goodput at the interval it chooses beside the simulated one, and beside other intervals."""
    interval_s = best_interval_s(costs.stall_s, failure_s)
    predicted = useful_fraction(interval_s, costs.stall_s, costs.restart_s, failure_s)
    by_factor = {
        factor: [simulate(costs, factor * interval_s, failure_s, failures=failures, seed=seed) for seed in seeds]
        for factor in FACTORS
    }
    reached = {factor: _mean([run.goodput for run in runs]) for factor, runs in by_factor.items()}
    chosen = by_factor[1.0]
    best_factor = max(reached, key=lambda factor: reached[factor])
    return {
        **asdict(costs),
        "failure_s": failure_s,
        "interval_s": interval_s,
        "predicted": predicted,
        "simulated": reached[1.0],
        "simulated_of_seeds": [run.goodput for run in chosen],
        "error": predicted / reached[1.0] - 1,
        "lost_s_of_a_failure": _mean([run.lost_s for run in chosen]),
        "failures": sum(run.failures for run in chosen),
        "cut_restarts": sum(run.cut_restarts for run in chosen),
        "days": sum(run.days for run in chosen),
        "best_of_factors": best_factor,
        "regret": 1 - reached[1.0] / reached[best_factor],
        "simulated_at_factors": {str(factor): value for factor, value in reached.items()},
    }


def assumed_costs(servers: int) -> Costs:
    """Return what the planner assumes for the run on ``servers`` of 8 H100."""
    said = goodput(ask(Wish(MODEL, cluster=f"{servers}x8xh100", tokens_per_step=1 << 24, seq_len=8192)).case)
    return Costs(STEP_S, said.save_s, WRITE_S, said.restart_s)


def state_bytes_per_card(servers: int) -> float:
    """Return how much of the state each of 8 cards of ``servers`` holds."""
    return ask(Wish(MODEL, cluster="1x8xh100")).case.network.parameters * STATE_BYTES_PER_WEIGHT / (8 * servers)


def with_measured(costs: Costs, files: Sequence[Mapping[str, Any]], servers: int) -> Costs:
    """Return ``costs`` of a run on ``servers`` with what was measured in place of what is assumed; raise ValueError
    where a file says none."""
    said: dict[str, float] = {}
    for file in files:
        told = file.get("costs", file)
        found = {name: told[name] for name in (*MEASURABLE, "bytes_per_rank", "restart_ranks") if name in told}
        wrong = [name for name, value in found.items() if not isinstance(value, int | float) or not 0 < value < 1e12]
        if not MEASURABLE & found.keys() or wrong:
            raise ValueError(f"the costs must give seconds above 0 for any of {', '.join(sorted(MEASURABLE))}")
        scale = state_bytes_per_card(servers) / found.pop("bytes_per_rank") if "bytes_per_rank" in found else 1.0
        said |= {name: value * (scale if name in OF_BYTES else 1.0) for name, value in found.items()}
    if "restart_s" in said:
        said["restart_s"] += said.get("load_s", 0.0)
        if "restart_ranks" in said:
            said["restart_s"] += LOST_SERVER_S + START_EACH_CARD_S * max(8 * servers - said["restart_ranks"], 0)
    return replace(costs, **{field.name: said[field.name] for field in fields(Costs) if field.name in said})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main(words: Sequence[str] | None = None) -> int:
    """Print one JSON object; exit code 1 where formula and simulation differ by more than is allowed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--costs", type=Path, nargs="+", default=[])
    parser.add_argument("--servers", type=int, default=2048)
    parser.add_argument("--interruptions", type=float, default=419)
    parser.add_argument("--days", type=float, default=54)
    parser.add_argument("--failures", type=int, default=4000, help="simulated, for each of the seeds")
    parser.add_argument("--json", default="-")
    given = parser.parse_args(words)
    costs = assumed_costs(given.servers)
    if given.costs:
        try:
            costs = with_measured(
                costs, [json.loads(file.read_text(encoding="utf-8")) for file in given.costs], given.servers
            )
        except (OSError, ValueError) as error:
            raise SystemExit(f"benchmark: {' '.join(map(str, given.costs))}: {error}") from None
    # The published rate is of 2,048 servers; failures grow with servers.
    rate = given.interruptions / given.days / 2048 * 1000
    found = row(costs, mean_time_between_failures_s(given.servers, rate), failures=given.failures)
    agrees = abs(found["error"]) <= ALLOWED
    shown = {
        "servers": given.servers,
        "cards": 8 * given.servers,
        "costs": [str(file) for file in given.costs] or "assumed by the planner",
        "published_effective_at_least": 0.9,
        "allowed_error": ALLOWED,
        "agrees": agrees,
        **found,
    }
    write_json(shown, given.json)
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
