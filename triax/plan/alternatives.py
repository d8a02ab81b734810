"""Which other layouts are worth knowing, and why not those? Slower ones, plainer ones, ones that do not fit."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from triax.plan.candidates import ORDERS, Candidates
from triax.plan.case import Case
from triax.plan.enumerate import Fixed
from triax.plan.legal import ZERO_STAGES, legal_mask
from triax.plan.memory import CATEGORIES
from triax.plan.search import Ranking, search
from triax.plan.step import WATERFALL
from triax.spec.layout import Layout
from triax.spec.legal_values import divisors
from triax.units import format_bytes, format_seconds

TERMS: Final = {
    "compute": "compute",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "bubble": "waiting in the pipeline",
    "pp": "sends of the pipeline",
    "dp": "gathering weights and summing gradients",
    "optimizer": "the update",
    "host": "waiting for the host",
    "jitter": "waiting for the slowest card",
}
"""What a step's seconds go to, in words."""
_FEW_SLOTS: Final = 6_000
ACROSS: Final = ORDERS.index(("tp", "pp", "dp_replicate", "dp_shard", "cp"))
"""The placement that puts the peers of tensor parallelism in different servers."""


@dataclass(frozen=True, slots=True)
class Other:
    """A layout that was not chosen."""

    index: int
    """Of the ranking."""
    layout: Layout
    step_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A layout that people would try first, and that cannot be."""

    what: str
    why: str


def others(ranking: Ranking, most: int = 5) -> list[Other]:
    """Return the best layouts that differ from the chosen one, and from each other, in more than details."""
    c = ranking.candidates
    seen = {_degrees(c, 0)}
    found: list[Other] = []
    for index in range(1, len(ranking)):
        if len(found) == most:
            break
        if _degrees(c, index) not in seen:
            seen.add(_degrees(c, index))
            step_s = float(ranking.step_s[index])
            found.append(Other(index, c.layout(index), step_s, _reason(ranking, index)))
    return found


def _degrees(c: Candidates, index: int) -> tuple[int, ...]:
    names = ("pp", "data_ranks", "cp", "tp", "ep")
    return (*(int(getattr(c, name)[index]) for name in names), int(c.zero[index] == 3))


def _reason(ranking: Ranking, index: int) -> str:
    """Return in what an alternative is worse than the chosen layout: the term that grew most."""
    slower = float(ranking.step_s[index] / ranking.step_s[0]) - 1
    more = {name: float(getattr(ranking.time, name)[index] - getattr(ranking.time, name)[0]) for name in WATERFALL}
    worst = max(more, key=lambda name: more[name])
    saved = float(ranking.memory.needed_bytes[0] - ranking.memory.needed_bytes[index])
    memory = f", {format_bytes(saved)} less memory" if saved > 0.05 * ranking.memory.usable_bytes else ""
    if slower <= ranking.case.tie:
        same = "as fast, as far as a prediction can tell"
        return f"{same}{memory}" if memory else f"{same}, and less plain"
    detail = f"{format_seconds(more[worst])} more for {TERMS[worst]}"
    if worst == "compute" and ranking.candidates.recompute[index] > ranking.candidates.recompute[0]:
        detail += " (computes activations again)"
    return f"{slower:.0%} slower: {detail}{memory}"


def one_row(c: Candidates, index: int, **changed: Any) -> Candidates:
    """Return one candidate with some columns changed."""
    names = [field.name for field in fields(Candidates) if field.name != "cuts"]
    columns = {name: getattr(c, name)[index : index + 1] for name in names} | changed
    return Candidates.of(cuts=c.cuts, **columns)


def best_of(case: Case, **decided: int) -> Ranking | None:
    """Return the best layouts with some columns decided; None where none is legal or none fits."""
    found = search(case, Fixed(decided), kept=8, most_slots=_FEW_SLOTS)
    return found if isinstance(found, Ranking) else None


def refused(ranking: Ranking) -> list[Refused]:
    """Return what people would try first and why it cannot be: does not fit, or cannot be cut so."""
    case = ranking.case
    found = [Refused(what, why) for what, row in _first_tries(case) if (why := _too_big(case, row))]
    most = int(ranking.candidates.tp[0])
    if "tp" in case.engine.axes and (why := why_not_tensor(case, 2 * most)):
        found.append(Refused(f"tp={2 * most}", why))
    return found


def _first_tries(case: Case) -> Iterator[tuple[str, Candidates]]:
    cards, step = case.machine.cards, case.workload.sequences_per_step
    if step % cards == 0 and cards > 1:
        stages = ZERO_STAGES[case.engine.family]
        for zero in stages:
            shared: dict[str, Any] = {"dp_shard": cards, "zero": zero} if zero else {"dp_replicate": cards, "zero": 0}
            name = f"data parallel alone, ZeRO-{zero}" if zero else "data parallel alone, a full copy on each card"
            row = Candidates.of(1, microbatches=step // cards, recompute=256, **shared)
            if legal_mask(case, row)[0]:
                yield name, row
    server = case.machine.cards_per_server
    if "tp" in case.engine.axes and cards == server > 1:
        row = Candidates.of(1, tp=server, microbatches=step, recompute=256, zero=min(ZERO_STAGES[case.engine.family]))
        if legal_mask(case, row)[0]:
            yield f"tensor parallel alone, tp={server}", row


def _too_big(case: Case, row: Candidates) -> str:
    memory = case.memory(row)
    if memory.fits[0]:
        return ""
    parts = {name: float(getattr(memory, name)[0]) for name in CATEGORIES}
    largest = max(parts, key=lambda name: parts[name])
    usable = memory.usable_bytes * (1 - memory.margin)
    return (
        f"needs {format_bytes(float(memory.needed_bytes[0]))} of a card's {format_bytes(usable)}, of which "
        f"{format_bytes(parts[largest])} {largest}, with everything recomputed"
    )


def why_not_tensor(case: Case, tp: int) -> str:
    """Return why matrices cannot be cut into ``tp`` parts, with the nearest number that can be; empty if they can."""
    network = case.network
    sizes = {"num_attention_heads": network.heads, "num_key_value_heads": network.kv_heads,
             "seq_len": case.workload.seq_len}  # fmt: skip
    undivided = [f"{name}={size}" for name, size in sizes.items() if size % tp]
    if not undivided:
        return ""
    legal = [each for each in divisors(int(np.gcd.reduce(list(sizes.values())))) if each < tp]
    return f"does not divide {' and '.join(undivided)}: at most tp={max(legal)}"
