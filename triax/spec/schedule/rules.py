"""Which pipeline schedules are there, which rank holds which stage, and which sizes are legal for each?

The names are PyTorch's. A *stage* is a run of consecutive layers; stages are numbered along the model, so a forward
goes from stage ``s`` to ``s + 1`` and a backward the other way. With ``stages_per_rank`` > 1 a pipeline rank holds
several stages, placed in one of two ways::

    loop   rank r holds r, r + pp, r + 2 pp, ...     pp=2, 2 per rank:  rank 0: 0 2   rank 1: 1 3
    v      rank r holds r and 2 pp - 1 - r           pp=2, 2 per rank:  rank 0: 0 3   rank 1: 1 2

Every schedule here has a table for every number of microbatches from one up; few microbatches cost idle time, which
``price`` tells, but they are never refused.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from triax.errors import BadInput
from triax.spec.layout import Refusal


@dataclass(frozen=True)
class ScheduleKind:
    """What distinguishes one schedule from another, apart from the order of its actions."""

    name: str
    summary: str
    source: str
    placement: Literal["loop", "v"]
    min_pp: int
    min_stages_per_rank: int
    max_stages_per_rank: int | None  # None: as many as the model has layers for
    splits_backward: bool  # has I (input gradient) and W (weight gradient) actions beside whole backwards, B


_KINDS: Final = (
    ScheduleKind(
        name="GPipe",
        summary="all forwards, then all backwards",
        source="Huang et al. 2018, arXiv:1811.06965",
        placement="loop",
        min_pp=1,
        min_stages_per_rank=1,
        max_stages_per_rank=1,
        splits_backward=False,
    ),
    ScheduleKind(
        name="1F1B",
        summary="backwards as early as possible, so that at most pp microbatches are held",
        source="Narayanan et al. 2021 (PipeDream-Flush), arXiv:2006.09503",
        placement="loop",
        min_pp=1,
        min_stages_per_rank=1,
        max_stages_per_rank=1,
        splits_backward=False,
    ),
    ScheduleKind(
        name="Interleaved1F1B",
        summary="1F1B over several stages per rank: the idle time shrinks by their number, more sends",
        source="Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2",
        placement="loop",
        min_pp=2,
        min_stages_per_rank=2,
        max_stages_per_rank=None,
        splits_backward=False,
    ),
    ScheduleKind(
        name="LoopedBFS",
        summary="GPipe over several stages per rank: each stage runs all microbatches before the next one",
        source="Lamy-Poirier 2022, arXiv:2211.05953",
        placement="loop",
        min_pp=2,
        min_stages_per_rank=2,
        max_stages_per_rank=None,
        splits_backward=False,
    ),
    ScheduleKind(
        name="InterleavedZeroBubble",
        summary="interleaved 1F1B whose weight gradients wait, to fill the idle time at the end (ZB-H1 with one stage)",
        source="Qi et al. 2023, arXiv:2401.10241",
        placement="loop",
        min_pp=2,
        min_stages_per_rank=1,
        max_stages_per_rank=None,
        splits_backward=True,
    ),
    ScheduleKind(
        name="ZBVZeroBubble",
        summary="two stages per rank folded into a V: no idle time in the middle, the same memory on every rank",
        source="Qi et al. 2023, arXiv:2401.10241, section 6, and 2024, arXiv:2405.15362",
        placement="v",
        min_pp=2,
        min_stages_per_rank=2,
        max_stages_per_rank=2,
        splits_backward=True,
    ),
    ScheduleKind(
        name="DualPipeV",
        summary="a V whose forwards and backwards come in pairs, so that one hides the other's communication",
        source="DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1, folded into a V (DualPipeV)",
        placement="v",
        min_pp=2,
        min_stages_per_rank=2,
        max_stages_per_rank=2,
        splits_backward=True,
    ),
)
SCHEDULES: Final[Mapping[str, ScheduleKind]] = MappingProxyType({kind.name: kind for kind in _KINDS})


def schedule_kind(name: str) -> ScheduleKind:
    """Return the schedule called ``name``; raise BadInput with the nearest names if there is none."""
    if name in SCHEDULES:
        return SCHEDULES[name]
    by_lower = {known.lower(): known for known in SCHEDULES}
    near = [by_lower[key] for key in difflib.get_close_matches(name.lower(), by_lower, n=2, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(SCHEDULES)}."
    raise BadInput(f"there is no pipeline schedule {name!r}: {hint}")


def splits_backward(name: str) -> bool:
    """Return whether the schedule computes input and weight gradients apart (I and W actions)."""
    return schedule_kind(name).splits_backward


def stage_owner(name: str, pp: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the pipeline rank that holds each stage, by stage: ``pp * stages_per_rank`` entries."""
    if schedule_kind(name).placement == "v":
        return (*range(pp), *reversed(range(pp)))
    return tuple(range(pp)) * stages_per_rank


def legal(name: str, pp: int, stages_per_rank: int, microbatches: int) -> list[Refusal]:
    """Return every reason why the schedule cannot have these sizes; empty means that ``build`` makes its table.

    Raises BadInput only if no schedule is called ``name``.
    """
    kind = schedule_kind(name)
    low, high = kind.min_stages_per_rank, kind.max_stages_per_rank
    refusals = []
    if pp < 1:
        refusals.append(Refusal("pp", f"pp={pp} is no number of pipeline ranks: use {kind.min_pp} or more."))
    elif pp < kind.min_pp:
        message = (
            f"schedule={name} spreads stages over ranks, and pp={pp} is one rank: use schedule=1F1B, or pp=2 or more."
        )
        refusals.append(Refusal("schedule", message))
    if stages_per_rank < low or (high is not None and stages_per_rank > high):
        bound = f"{low} or more" if high is None else f"{low}" if low == high else f"{low} to {high}"
        message = f"stages_per_rank={stages_per_rank} does not fit schedule={name}: use {bound}."
        refusals.append(Refusal("stages_per_rank", message))
    if microbatches < 1:
        refusals.append(Refusal("microbatches", f"microbatches={microbatches} leaves nothing to run: use 1 or more."))
    return refusals
