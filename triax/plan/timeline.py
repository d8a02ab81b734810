"""How long does a pipeline take, from what its ranks compute on one microbatch?

``closed_form_s`` ranks a million layouts; ``priced_s`` walks the schedule table that the trainer executes, exactly, for
those that are left. A test holds them close.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from triax.plan.candidates import SCHEDULE_NAMES, Integers, Numbers
from triax.spec.schedule import Slot, build, price

_SPLIT: Final = tuple(SCHEDULE_NAMES.index(name) for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"))


@dataclass(frozen=True, eq=False)
class Ranks:
    """Seconds of one microbatch on a pipeline rank, all its stages together, forward and backward.

    ``first`` and ``last`` hold embedding and head; ``middle`` is any other, with the most layers.
    """

    first_f: Numbers
    first_b: Numbers
    middle_f: Numbers
    middle_b: Numbers
    last_f: Numbers
    last_b: Numbers


def closed_form_s(
    ranks: Ranks, *, pp: Integers, stages_per_rank: Integers, microbatches: Integers, schedule: Integers
) -> tuple[Numbers, Numbers]:
    """Return (busy, idle) seconds of a step's forwards and backwards, as the slowest rank sees them.

    The slowest rank works on all microbatches without a break, m x t; before its first and after its last one the
    others work alone. With v stages a rank that is a v-th of them: (p - 1) / v x the mean time of another rank
    (arXiv:2104.04473, section 2.2; unequal ranks: each of the others is passed once).
    """
    first, last = ranks.first_f + ranks.first_b, ranks.last_f + ranks.last_b
    middle = ranks.middle_f + ranks.middle_b
    alone = pp == 1
    whole = first + last - middle
    busiest = np.where(
        alone, whole, np.where(pp == 2, np.maximum(first, last), np.maximum(np.maximum(first, last), middle))
    )
    forward = ranks.first_f + ranks.last_f + (pp - 2) * ranks.middle_f
    backward = ranks.first_b + ranks.last_b + (pp - 2) * ranks.middle_b
    others_f = forward - np.where(
        busiest == last, ranks.last_f, np.where(busiest == first, ranks.first_f, ranks.middle_f)
    )
    others_b = backward - np.where(
        busiest == last, ranks.last_b, np.where(busiest == first, ranks.first_b, ranks.middle_b)
    )
    idle = (others_f + others_b) / stages_per_rank
    # Rounds of pp microbatches: an incomplete one still takes its time with several stages a rank.
    missing = np.where((stages_per_rank > 1) & (microbatches < pp), pp - microbatches, 0)
    idle = idle + missing * (stages_per_rank - 1) / stages_per_rank * middle
    if np.isin(schedule, _SPLIT).any():
        split = _split_idle_s(others_f, others_b / 2, pp, stages_per_rank, microbatches)
        for index, name in enumerate(_SPLIT):
            idle = np.where(schedule == name, split[index], idle)
    busy: Numbers = busiest * microbatches.astype(np.float64)
    return busy, np.where(alone, 0.0, idle)


def _split_idle_s(
    forward: Numbers, half: Numbers, pp: Integers, stages_per_rank: Integers, microbatches: Integers
) -> tuple[Numbers, Numbers, Numbers]:
    """Return the idle seconds of ZB-H1, ZB-V and DualPipeV, whose backwards are two halves of ``half`` seconds each.

    ``forward`` and ``half`` are of all other ranks together. With enough microbatches a rank waits for the longer of a
    forward and half a backward (ZB-H1; arXiv:2401.10241, table 1), half of that (ZB-V) or about a forward (DualPipeV);
    with one microbatch each waits for what is on its way. Between the two the priced tables go in straight lines.
    """
    alone, rounds = np.clip((microbatches - 1) / np.maximum(pp - 1, 1), 0, 1), microbatches / pp
    longer, way = np.maximum(forward, half), forward + half
    steady = longer / stages_per_rank
    h1 = way + np.minimum(alone * np.where(stages_per_rank > 1, 1.5, 1.0), 1.0) * (steady - way)
    middle = np.maximum(way / 2, half)
    v = np.where(
        rounds <= 1, way + alone * (middle - way), middle + np.clip(2 * (rounds - 1), 0, 1) * (longer / 2 - middle)
    )
    start, steady = forward + 1.15 * half, forward + 0.4 * np.maximum(half - forward, 0)
    dual = np.where(
        rounds <= 1, forward * (1 - alone) + 1.5 * half, start + np.clip(rounds - 1, 0, 1) * (steady - start)
    )
    return h1, v, dual


def priced_s(
    schedule: str, pp: int, microbatches: int, stage_f: Sequence[float], stage_b: Sequence[float], send: float = 0.0
) -> float:
    """Return the seconds of a step's forwards and backwards, exactly, from those of each stage.

    A backward that is split spends half on gradients of inputs and half on those of weights.
    """
    table = build(schedule, pp, len(stage_f) // pp, microbatches)

    def cost(slot: Slot) -> float:
        part = {"F": 0.0, "B": 1.0, "I": 0.5, "W": 0.5}
        return sum(
            stage_f[action.stage] if action.kind == "F" else part[action.kind] * stage_b[action.stage]
            for action in slot.parts
        )

    return price(table, cost, send).makespan_s
