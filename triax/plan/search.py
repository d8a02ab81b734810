"""Which layouts are the best of a case? All of them are bounded, the good ones priced, the best returned in order.

The lower bound of a shape is what no variant can avoid: its work without recomputation, tensor, context and expert
traffic, its bubble, and the update where it is shared most. Shapes are opened best bound first, until the next bound is
worse than what is kept; of those that may fit at all the variants are priced, and recomputed only where they are good
enough without. So what is left out is proven slower or too big, and the answer is that of pricing every layout.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from triax.plan.candidates import Candidates, Integers, Numbers
from triax.plan.case import Case
from triax.plan.enumerate import Fixed, count_layouts, plain_variants, recomputed, shapes, splits
from triax.plan.legal import ZERO_STAGES
from triax.plan.memory import Memory, is_walked
from triax.plan.step import StepTime
from triax.plan.walk import MOST_SLOTS, walked

SLACK: Final = 0.15
"""Layouts up to this part slower than the best are kept: alternatives, and those that need less memory."""
KEPT: Final = 200
_ROOMS: Final = (1.0, 0.85, 0.7, 0.5)
"""Parts of a card's memory that closed forms may fill."""
_FIRST: Final = 128
"""Shapes that are opened first; each further round opens twice as many."""


@dataclass(frozen=True, eq=False)
class Ranking:
    """The best layouts of a case, the chosen one first, then by step time."""

    case: Case
    candidates: Candidates
    memory: Memory
    time: StepTime
    step_s: Numbers
    considered: int
    """Layouts that the search is over."""
    priced: int
    """Layouts whose time or memory had to be computed."""

    def __len__(self) -> int:
        return len(self.candidates)

    def take(self, rows: Integers) -> "Ranking":
        """Return the layouts at ``rows``."""
        return replace(
            self, candidates=self.candidates.take(rows), memory=self.memory.take(rows), time=self.time.take(rows),
            step_s=self.step_s[rows],
        )  # fmt: skip

    @property
    def front(self) -> Integers:
        """Indices of layouts that no other beats in both time and memory, fastest first."""
        needed = self.memory.needed_bytes
        order = np.lexsort((needed, self.step_s))
        before = np.concatenate([[np.inf], np.minimum.accumulate(needed[order])[:-1]])
        front: Integers = order[needed[order] < before]
        return front


@dataclass(frozen=True, eq=False)
class Misfit:
    """No layout fits: the one that comes nearest, and how many there were."""

    case: Case
    candidates: Candidates
    memory: Memory
    considered: int


def search(
    case: Case, fixed: Fixed | None = None, *, kept: int = KEPT, most_slots: int = MOST_SLOTS
) -> Ranking | Misfit | None:
    """Return the ``kept`` best layouts of ``case``; a Misfit where none fits, None where none is legal.

    Pipelines of the first ones are walked, up to ``most_slots`` forwards and backwards, and ordered again. Where nobody
    measured what cutting sequences costs, it must gain more than the doubt about it.
    """
    found = _search(case, fixed or Fixed(), kept, most_slots)
    if not isinstance(found, Ranking) or found.candidates.cp[0] == 1 or not case.engine.context_doubt:
        return found
    whole = _search(case, (fixed or Fixed()).with_("cp", 1), kept, most_slots)
    if not isinstance(whole, Ranking) or whole.step_s[0] > found.step_s[0] * (1 + case.engine.context_doubt):
        return found
    return replace(whole, considered=found.considered, priced=found.priced + whole.priced)


def _search(case: Case, fixed: Fixed, kept: int, most_slots: int) -> Ranking | Misfit | None:
    """Search by closed forms and walk the best of what fits; where none of these does, search in less room."""
    if not is_walked(case.network, case.workload, case.engine):
        return _found(case, fixed, kept, most_slots)
    misfit: Misfit | None = None
    for room in _ROOMS:
        found = _found(_with_room(case, room), fixed, kept, most_slots)
        if not isinstance(found, Ranking):
            return misfit if misfit is not None or found is None else replace(found, case=case)
        walked = _walked(found, case)
        if isinstance(walked, Ranking):
            return walked
        misfit = walked
    return misfit


def _found(case: Case, fixed: Fixed, kept: int, most_slots: int) -> Ranking | Misfit | None:
    shaped = shapes(case, fixed)
    if not len(shaped):
        return None
    considered = count_layouts(case, shaped, fixed)
    bounds = _bounds(case, shaped)
    order = np.argsort(bounds, kind="stable")
    limit, priced = np.inf, 0
    found: list[Candidates] = []
    step_s: Numbers = np.zeros(0)
    at, size = 0, _FIRST
    while at < len(order) and bounds[order[at]] <= limit:
        chosen = order[at : at + size]
        chosen = chosen[bounds[chosen] <= limit]
        at, size = at + size, 2 * size
        chosen = chosen[may_fit(case, shaped.take(chosen))]
        if not len(chosen):
            continue
        opened, seconds = _open(case, shaped.take(np.sort(chosen)), fixed, limit, kept)
        priced += len(opened)
        found, step_s = [*found, opened], np.concatenate([step_s, seconds])
        limit = _limit(step_s, kept)
    if not np.isfinite(limit):
        return _nearest(case, shaped, considered)
    return _ranked(case, _joined(found), step_s, considered, priced, kept, most_slots)


def _limit(step_s: Numbers, kept: int) -> float:
    """Return how slow a layout may be and still be kept beside those that take ``step_s``."""
    if len(step_s) < kept:
        return float(step_s.min(initial=np.inf)) * (1 + SLACK)
    return min(float(step_s.min()) * (1 + SLACK), float(np.partition(step_s, kept - 1)[kept - 1]))


def _bounds(case: Case, shaped: Candidates) -> Numbers:
    """Return the seconds that no variant of a shape can avoid."""
    plain = Candidates.of(
        len(shaped), **{name: getattr(shaped, name) for name in _SHAPE}, zero=_zero_of(shaped), recompute=0
    )
    time = case.time(plain)
    bound: Numbers = time.step_s - time.dp - time.pp
    return bound


_SHAPE: Final = (
    "tp", "cp", "cp_method", "pp", "dp_replicate", "dp_shard", "schedule", "stages_per_rank",
    "sequences_per_microbatch", "microbatches", "ep",
)  # fmt: skip


def _zero_of(c: Candidates) -> Integers:
    zero: Integers = np.minimum(c.zero, 1)
    return zero


def _open(case: Case, shaped: Candidates, fixed: Fixed | None, limit: float, kept: int) -> tuple[Candidates, Numbers]:
    """Return the variants of ``shaped`` that fit and are among the ``kept`` best, none slower than ``limit``; with the
    seconds of their steps."""
    plain = plain_variants(case, shaped, fixed)
    opened = recomputed(case, plain.take(case.time(plain).step_s <= limit), fixed)
    step_s = case.time(opened).step_s if len(opened) else np.zeros(0)
    # The fastest first: once enough of them fit, the slow ones need no look at their memory.
    order = np.argsort(step_s, kind="stable")
    fit: Integers = np.zeros(0, dtype=np.int64)
    for start in range(0, len(order), 4096):
        rows = order[start : start + 4096]
        rows = rows[step_s[rows] <= limit]
        if not len(rows):
            break
        fit = np.concatenate([fit, rows[case.memory(opened.take(rows)).fits]])
        limit = min(limit, _limit(step_s[fit], kept))
    fit = np.sort(fit[step_s[fit] <= limit])
    return opened.take(fit), step_s[fit]


def may_fit(case: Case, shaped: Candidates) -> NDArray[np.bool_]:
    """Return which shapes have a variant that fits: one that does not in its smallest variant fits in none.

    Where an engine gathers once in a pipeline, ZeRO-3 keeps gradients whole and ZeRO-2 reduces them through buffers.
    Ranks of one sequence may share nothing, which needs no copies of experts that nobody shares. Which is
    smaller depends on the sizes, and both are looked at. Where backwards are split, so does what is smaller, to keep
    everything or to run layers again.
    """
    fits = case.memory(shaped).fits
    others = np.where((shaped.cp > 1) & (shaped.data_ranks == 1), min(ZERO_STAGES[case.engine.family]), shaped.zero)
    if case.engine.gathers_once_in_pipeline:
        in_pipeline = np.where((shaped.pp > 1) & (shaped.zero == 2), 3, shaped.zero)
        fits = fits | _fits_with(case, shaped, ~fits, zero=in_pipeline)
    fits = fits | _fits_with(case, shaped, ~fits, zero=others)
    if not case.engine.splits_whole:
        return fits
    plain = np.where(splits(shaped.schedule), 0, shaped.recompute)
    fits = fits | _fits_with(case, shaped, ~fits, recompute=plain)
    return fits | _fits_with(case, shaped, ~fits, recompute=plain, zero=others)


def _fits_with(case: Case, shaped: Candidates, asked: NDArray[np.bool_], **columns: Integers) -> NDArray[np.bool_]:
    """Return which of the shapes that are asked for fit with other values of ``columns``."""
    differs = np.zeros(len(shaped), dtype=np.bool_)
    for name, column in columns.items():
        differs |= getattr(shaped, name) != column
    rows = np.flatnonzero(asked & differs)
    fits = np.zeros(len(shaped), dtype=np.bool_)
    if len(rows):
        others: dict[str, Any] = dict(columns)
        fits[rows] = case.memory(replace(shaped, **others).take(rows)).fits
    return fits


def _nearest(case: Case, shaped: Candidates, considered: int) -> Misfit:
    bytes_needed = case.memory(shaped).needed_bytes
    nearest = shaped.take([int(np.argmin(bytes_needed))])
    return Misfit(case, nearest, case.memory(nearest), considered)


def _ranked(
    case: Case, found: Candidates, step_s: Numbers, considered: int, priced: int, kept: int, most_slots: int
) -> Ranking:
    order = np.argsort(step_s, kind="stable")
    best = found.take(order[step_s[order] <= step_s[order[0]] * (1 + SLACK)][:kept])
    time = walked(case, best, most_slots)
    # Nine digits: processors differ in the last one, and ranks that plan for themselves must come to the same.
    relative = np.round(time.step_s / time.step_s.min(), 9)
    order = np.argsort(relative, kind="stable")
    tied = order[relative[order] <= round(1 + case.tie, 9)]
    chosen = _robust_and_plain(case, best, time.step_s, tied)
    order = np.concatenate([[chosen], order[order != chosen]])
    best, time = best.take(order), time.take(order)
    return Ranking(case, best, case.memory(best), time, time.step_s, considered, priced)


def _walked(found: Ranking, case: Case) -> Ranking | Misfit:
    """Return ``found`` with the memory of each layout walked, without those that by that do not fit ``case``."""
    memory = case.walked_memory(found.candidates)
    rows = np.flatnonzero(memory.fits)
    if not len(rows):
        nearest = np.array([int(np.argmin(memory.needed_bytes))])
        return Misfit(case, found.candidates.take(nearest), memory.take(nearest), found.considered)
    return replace(found, case=case, memory=memory).take(rows)


def _with_room(case: Case, part: float) -> Case:
    """Return ``case`` on cards that have ``part`` of their memory."""
    card = replace(case.machine.card, memory_bytes=int(case.machine.card.memory_bytes * part))
    return replace(case, machine=replace(case.machine, card=card))


def _robust_and_plain(case: Case, best: Candidates, step_s: Numbers, tied: Integers) -> int:
    """Return which of equally fast layouts to take: of those that a slow network hurts least, the plainest.

    The network between servers is shared, and what is least certain of a machine.
    """
    if case.machine.cards > case.machine.domain:
        slow = replace(case, machine=replace(case.machine, server_bytes_per_s=case.machine.server_bytes_per_s / 2))
        rows = best.take(tied)
        hurt = step_s[tied] + slow.time(rows).step_s - case.time(rows).step_s
        tied = tied[np.round(hurt / hurt.min(), 9) <= round(1 + case.tie, 9)]
    return int(tied[np.argmin(_complexity(best.take(tied)))])


def _complexity(c: Candidates) -> Numbers:
    """Return how much a layout asks of whoever runs it: of equally fast ones the plainest is chosen.

    Axes that are cut count most, then recomputation, then what is unusual in schedule, sharing and placement.
    """
    axes = sum((degree > 1).astype(np.float64) for degree in (c.pp, c.dp_replicate, c.dp_shard, c.cp, c.tp, c.ep))
    details = (c.stages_per_rank > 1) * 0.3 + (c.order > 0) * 0.2 + c.zero * 0.01 + (c.recompute > 0) * 0.5
    result: Numbers = axes + details + 0.001 * np.log2(c.tp * c.pp * c.cp)
    return result


def _joined(rows: list[Candidates]) -> Candidates:
    if len(rows) == 1:
        return rows[0]
    names = (*_SHAPE, "zero", "recompute", "order")
    columns: dict[str, Any] = {name: np.concatenate([getattr(row, name) for row in rows]) for name in names}
    return Candidates.of(len(columns["pp"]), **columns)
