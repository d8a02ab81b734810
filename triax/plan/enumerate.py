"""Which layouts are there for a case? All of them, in two levels of integer arrays.

A *shape* says what decides most of the time: degrees, schedule, sequences of a microbatch. Its *variants* say the rest:
how the data axes share, what is recomputed, which axis is outermost. A search bounds shapes and opens the variants of
good ones only; ``all_layouts`` opens them all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isqrt
from typing import Any, Final

import numpy as np

from triax.plan.candidates import CP_METHODS, ORDERS, RECOMPUTE, SCHEDULE_NAMES, Candidates, Integers
from triax.plan.case import Case
from triax.plan.legal import ZERO_STAGES, legal_mask
from triax.spec.layout import AXES
from triax.spec.legal_values import divisors
from triax.spec.schedule import SCHEDULES

Columns = dict[str, Integers]

_STAGES_PER_RANK: Final = (1, 2, 3, 4, 5, 6, 7, 8)
_MOST_TOKENS: Final = 1 << 18
"""Of a microbatch on one rank: larger ones gain nothing that a plan could see (*assumed*)."""
_LARGEST_TP: Final = 64
_SCHEDULES: Final = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""GPipe and LoopedBFS are left out: as long as 1F1B and its interleaved kind, and never smaller."""
_CP_METHODS_OF: Final[Mapping[str, tuple[int, ...]]] = {"triax": tuple(range(len(CP_METHODS)))}
"""By family of engines; others have one way, by whatever name."""
_SCHEDULES_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "triax": _SCHEDULES,
    "fsdp": _SCHEDULES,
    "megatron": _SCHEDULES[:2],
    "deepspeed": _SCHEDULES[:1],
    "jax": _SCHEDULES[:2],
}
"""By family of engines."""
_ORDERS: Final = tuple(
    ORDERS.index(order)
    for order in (
        AXES,
        ("dp_replicate", "pp", "dp_shard", "cp", "tp"),
        ("dp_replicate", "dp_shard", "pp", "cp", "tp"),
    )
)
"""Placements that differ in more than name: tp and cp are always innermost, since they speak most often."""
_RECOMPUTE_COST: Final = tuple(RECOMPUTE[name] for name in ("none", "selective", "full"))


@dataclass(frozen=True)
class Fixed:
    """Columns that the user has decided: degrees, zero, recompute and so on, by name."""

    columns: Mapping[str, int] = field(default_factory=dict)

    def with_(self, name: str, value: int) -> "Fixed":
        """Return the same with ``name`` at ``value`` where the user has not decided it."""
        return Fixed({name: value, **self.columns})

    def among(self, name: str, values: Sequence[int]) -> Sequence[int]:
        """Return ``values``, or the one that was decided."""
        return (self.columns[name],) if name in self.columns else values


def shapes(case: Case, fixed: Fixed | None = None) -> Candidates:
    """Return every shape, with the variant that needs least memory: a shape that does not fit fits in no variant."""
    fixed = fixed or Fixed()
    cards, step = case.machine.cards, case.workload.sequences_per_step
    engine, network = case.engine, case.network
    whole = divisors(cards)

    def degree(axis: str, most: int) -> Sequence[int]:
        legal = whole if axis in engine.axes else [1]
        return fixed.among(axis, [value for value in legal if value <= most])

    rows = _cross(
        {}, tp=degree("tp", _LARGEST_TP), cp=degree("cp", case.workload.seq_len), pp=degree("pp", network.layers),
        cp_method=fixed.among("cp_method", _CP_METHODS_OF.get(engine.family, (0,))),
    )  # fmt: skip
    rows = _where(rows, (rows["cp"] > 1) | (rows["cp_method"] == rows["cp_method"].min()))
    rows = _cross(
        rows, schedule=_schedules(case, fixed), stages_per_rank=fixed.among("stages_per_rank", _STAGES_PER_RANK)
    )
    group = rows["tp"] * rows["cp"] * rows["pp"]
    data = np.where(cards % group == 0, cards // group, 0)
    rows = _where(rows | {"data": data}, (data > 0) & (step % np.maximum(data, 1) == 0))
    rows = _cross(rows, sequences_per_microbatch=fixed.among("sequences_per_microbatch", _microbatches(case)))
    share = step // rows["data"]
    rows = _where(rows | {"microbatches": share // rows["sequences_per_microbatch"]},
                  share % rows["sequences_per_microbatch"] == 0)  # fmt: skip
    if "microbatches" in fixed.columns:
        rows = _where(rows, rows["microbatches"] == fixed.columns["microbatches"])
    experts = 1 if network.experts is None or "ep" not in engine.axes else network.experts.count
    rows = _cross(rows, ep=fixed.among("ep", divisors(experts)))
    return _legal(case, _smallest(case, rows, fixed))


def _schedules(case: Case, fixed: Fixed) -> Sequence[int]:
    names = _SCHEDULES_OF[case.engine.family]
    return fixed.among("schedule", [SCHEDULE_NAMES.index(name) for name in names])


def _microbatches(case: Case) -> Sequence[int]:
    """Return sequences of one forward that are tried: all small divisors of a step."""
    step = case.workload.sequences_per_step
    most = max(_MOST_TOKENS // case.workload.seq_len, 1)
    limit = min(most, max(isqrt(step) * 2, 1))
    return [size for size in divisors(step) if size <= limit]


def _smallest(case: Case, rows: Columns, fixed: Fixed) -> Columns:
    """Return the shapes with everything shared and recomputed, as far as their schedule allows."""
    stages = fixed.among("zero", ZERO_STAGES[case.engine.family])
    is_split = splits(rows["schedule"])
    deepest = np.where(
        is_split & (max(stages) == 3), max([stage for stage in stages if stage < 3], default=3), max(stages)
    )
    shared = rows.pop("data")
    shard = fixed.columns.get("dp_shard")
    replicate = fixed.columns.get("dp_replicate", 1) if shard is None else np.maximum(shared // shard, 1)
    if case.engine.family == "deepspeed":
        deepest = np.where(rows["pp"] > 1, np.minimum(deepest, 1), deepest)
    if case.engine.gathers_once_in_pipeline and 2 in stages:  # and so keeps whole gradients under ZeRO-3
        deepest = np.where(rows["pp"] > 1, np.minimum(deepest, 2), deepest)
    can_share = (deepest > 0) & ("dp_shard" in case.engine.axes)
    is_sharded = can_share & (shared > 1) & (shard != 1)
    is_shared = is_sharded | (can_share & (rows["cp"] > 1))  # ranks of one sequence share as those of dp_shard do
    own = rows | {
        "dp_replicate": np.where(is_sharded, replicate, shared),
        "dp_shard": np.where(is_sharded, shared // replicate, 1),
        "zero": np.where(is_shared, deepest, min(stages)),
        "recompute": np.full_like(shared, max(fixed.among("recompute", _RECOMPUTE_COST))),
        "order": np.full_like(shared, fixed.among("order", _ORDERS)[0]),
    }
    kept = own["dp_replicate"] * own["dp_shard"] == shared
    for name in ("dp_replicate", "dp_shard"):
        kept &= own[name] == fixed.columns.get(name, own[name])
    return _where(own, kept)


def splits(schedule: Integers) -> Any:
    """Return which schedules split their backwards."""
    return np.array([SCHEDULES[name].splits_backward for name in SCHEDULE_NAMES])[schedule]


def variants(case: Case, chosen: Candidates, fixed: Fixed | None = None) -> Candidates:
    """Return all layouts of the shapes ``chosen``, those of one shape beside each other."""
    return recomputed(case, plain_variants(case, chosen, fixed), fixed)


def recomputed(case: Case, plain: Candidates, fixed: Fixed | None = None) -> Candidates:
    """Return the layouts ``plain`` with every kind of recomputation, those of one layout beside each other."""
    rows = {name: getattr(plain, name) for name in (*_SHAPE, "dp_replicate", "dp_shard", "zero", "order")}
    return _legal(case, _cross(rows, recompute=(fixed or Fixed()).among("recompute", _RECOMPUTE_COST)))


_SHAPE: Final = (
    "tp", "cp", "cp_method", "pp", "schedule", "stages_per_rank", "sequences_per_microbatch", "microbatches", "ep",
)  # fmt: skip


def plain_variants(case: Case, chosen: Candidates, fixed: Fixed | None = None) -> Candidates:
    """Return the layouts of the shapes ``chosen`` that compute nothing again: none is faster with recomputation."""
    fixed = fixed or Fixed()
    rows = {name: getattr(chosen, name) for name in _SHAPE} | {"data": chosen.data_ranks}
    most = int(rows["data"].max()) if len(chosen) else 1
    replicas = divisors(case.machine.cards) if "dp_replicate" in case.engine.axes else [1]
    replicas = [value for value in replicas if value <= most]
    rows = _cross(rows, dp_replicate=fixed.among("dp_replicate", replicas))
    rows = _where(rows, rows["data"] % rows["dp_replicate"] == 0)
    rows["dp_shard"] = rows.pop("data") // rows["dp_replicate"]
    if "dp_shard" in fixed.columns:
        rows = _where(rows, rows["dp_shard"] == fixed.columns["dp_shard"])
    rows = _cross(rows, zero=fixed.among("zero", ZERO_STAGES[case.engine.family]))
    rows = _where(rows, _is_worth(case, rows, fixed))
    rows = _cross(rows, order=fixed.among("order", _ORDERS))
    rows = _where(rows, (rows["order"] == fixed.among("order", _ORDERS)[0]) | _differs(case, rows))
    rows["recompute"] = np.full_like(rows["order"], min(fixed.among("recompute", _RECOMPUTE_COST)))
    return _legal(case, rows)


def _is_worth(case: Case, rows: Columns, fixed: Fixed) -> Any:
    """Leave out what is another candidate under another name: a stage that nobody shares, sharing within one rank."""
    alone = rows["dp_shard"] * (rows["cp"] if "dp_shard" in case.engine.axes else 1) == 1
    least = min(fixed.among("zero", ZERO_STAGES[case.engine.family]))
    return np.where(alone, rows["zero"] == least, (rows["zero"] > 0) | (rows["dp_shard"] == 1))


def _differs(case: Case, rows: Columns) -> Any:
    """Placements differ where a pipeline and a data axis compete for the places that are left in a domain."""
    competes = (rows["pp"] > 1) & (rows["tp"] * rows["cp"] < case.machine.domain)
    second, third = _ORDERS[1:]
    is_second = (rows["order"] == second) & (rows["dp_replicate"] > 1)
    return competes & (is_second | ((rows["order"] == third) & (rows["dp_shard"] > 1)))


def all_layouts(case: Case, fixed: Fixed | None = None) -> Candidates:
    """Return every layout of ``case``: what a search finds the best of."""
    return variants(case, shapes(case, fixed), fixed)


def count_layouts(case: Case, chosen: Candidates, fixed: Fixed | None = None) -> int:
    """Return how many layouts the shapes ``chosen`` have, without opening all: shapes alike have as many."""
    if not len(chosen):
        return 0
    codes = _alike(chosen)
    _, first, times = np.unique(codes, return_index=True, return_counts=True)
    opened = variants(case, chosen.take(first), fixed)
    # Each shape that was opened stands for all that are alike; whatever their schedule is called, it counts the same.
    stands_for = dict(zip(codes[first].tolist(), times.tolist(), strict=True))
    kinds, number = np.unique(_alike(opened, of=chosen), return_counts=True)
    return int(sum(stands_for[kind] * count for kind, count in zip(kinds.tolist(), number.tolist(), strict=True)))


def _alike(c: Candidates, of: Candidates | None = None) -> Integers:
    """Return a number for each shape that says what its variants depend on, in the digits that ``of`` needs."""
    radix = of if of is not None else c
    columns = (
        (c.tp, radix.tp), (c.cp, radix.cp), (c.pp, radix.pp), (c.data_ranks, radix.data_ranks), (c.ep, radix.ep),
    )  # fmt: skip
    code: Integers = splits(c.schedule).astype(np.int64)
    for column, whole in columns:
        code = code * (int(whole.max()) + 1) + column
    return code


def _cross(rows: Columns, **columns: Sequence[int]) -> Columns:
    """Return every row with every combination of the values of ``columns``."""
    for name, values in columns.items():
        length = len(next(iter(rows.values()))) if rows else 1
        rows = {key: np.repeat(column, len(values)) for key, column in rows.items()}
        rows[name] = np.tile(np.asarray(values, dtype=np.int64), length)
    return rows


def _where(rows: Columns, mask: Any) -> Columns:
    return {key: column[mask] for key, column in rows.items()}


def _legal(case: Case, rows: Columns) -> Candidates:
    columns: dict[str, Any] = dict(rows)
    found = Candidates.of(len(next(iter(rows.values()))), **columns)
    return found.take(legal_mask(case, found))
