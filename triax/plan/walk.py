"""How long is a step by the schedule table that the trainer executes, stage by stage, instead of by a closed form?

A walk sees stages of unequal length: embedding, head, a layer more or less. Long steps are walked in part: between the
first and the last microbatches a pipeline repeats itself, so that two walks a round apart give the rest.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from triax.plan.candidates import SCHEDULE_NAMES, Candidates, Numbers
from triax.plan.case import Case
from triax.plan.memory.stages import stage_sizes
from triax.plan.parts import parts
from triax.plan.step import Layers, StepTime, layers
from triax.plan.timeline import priced_s
from triax.spec.schedule import stage_owner

_ROUNDS: Final = 3
"""Rounds of pp microbatches after which a pipeline repeats itself."""
MOST_SLOTS: Final = 16_000
"""Forwards and backwards that are walked for one question, less than a tenth of a second."""


def walked(case: Case, candidates: Candidates, most_slots: int = MOST_SLOTS) -> StepTime:
    """Return the step of each candidate, with the bubble of as many as ``most_slots`` allows walked, first ones first.

    The others keep the closed form; without a pipeline there is nothing to walk.
    """
    made = parts(case.network, case.workload, case.machine, case.engine, candidates)
    time = case.time(candidates)
    at = layers(made, case.factors(len(candidates)))
    busy, bubble = time.compute + time.tp + time.cp + time.ep + time.host, time.bubble.copy()
    compute = time.compute.copy()
    slots = 0
    for index in np.flatnonzero(candidates.pp > 1).tolist():
        slots += _slots(candidates, index)
        if slots > most_slots:
            break
        stage_f, stage_b = _stages(case, candidates, at, index)
        makespan = _makespan_s(candidates, index, stage_f, stage_b)
        owner = stage_owner(_schedule(candidates, index), int(candidates.pp[index]), _per_rank(candidates, index))
        of_rank = np.bincount(owner, weights=np.asarray(stage_f) + np.asarray(stage_b))
        busiest = float(of_rank.max()) * int(candidates.microbatches[index])
        compute[index] += busiest - busy[index]
        bubble[index] = max(makespan - busiest, 0.0)
    return replace(time, compute=compute, bubble=bubble)


def _schedule(c: Candidates, index: int) -> str:
    return SCHEDULE_NAMES[int(c.schedule[index])]


def _per_rank(c: Candidates, index: int) -> int:
    return int(c.stages_per_rank[index])


def _slots(c: Candidates, index: int) -> int:
    """Forwards and backwards of the walks of one candidate."""
    pp, microbatches = int(c.pp[index]), int(c.microbatches[index])
    first, second = _walks(pp, microbatches)
    return 2 * pp * _per_rank(c, index) * (microbatches if first == second else first + second)


def _walks(pp: int, microbatches: int) -> tuple[int, int]:
    """Return the two numbers of microbatches that are walked; twice the same where the whole step is."""
    first = _ROUNDS * pp + microbatches % pp
    return (microbatches, microbatches) if microbatches <= first + pp else (first, first + pp)


def _makespan_s(c: Candidates, index: int, stage_f: list[float], stage_b: list[float]) -> float:
    pp, microbatches, name = int(c.pp[index]), int(c.microbatches[index]), _schedule(c, index)
    first, second = _walks(pp, microbatches)
    start = priced_s(name, pp, first, stage_f, stage_b)
    if first == second:
        return start
    round_s = priced_s(name, pp, second, stage_f, stage_b) - start
    return start + round_s * (microbatches - first) / pp


def _stages(case: Case, c: Candidates, at: Layers, index: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each stage's forward and backward, first stage first."""
    count = int(c.pp[index]) * _per_rank(c, index)
    cut = int(c.cut[index])
    is_by_cost = case.engine.family == "triax"
    sizes = stage_sizes(case.network, count, None if cut < 0 else c.cuts[cut], is_by_cost=is_by_cost)
    part: Numbers = np.asarray(sizes) / case.network.layers
    forward, backward = part * at.forward[index], part * at.backward[index]
    forward[0] += at.embedding[index] / 2
    backward[0] += at.embedding[index] / 2
    forward[-1] += at.head[index] / 3
    backward[-1] += at.head[index] * 2 / 3
    return forward.tolist(), backward.tolist()
