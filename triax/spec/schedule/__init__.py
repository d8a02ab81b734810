"""What does each pipeline rank run, in which order, and when? One truth for planner, trainer and report.

``build`` makes the table of a schedule, ``price`` puts it on a time axis, a ``MeasuredStep`` says when it really ran,
and ``draw`` shows either as text; ``legal`` and ``stage_owner`` answer for a layout before any table is made. Gradient
accumulation without a pipeline is the table of one stage: 1F1B with ``pp=1`` is F0 B0 F1 B1 and so on, GPipe all
forwards first.
"""

from triax.spec.schedule.draw import draw
from triax.spec.schedule.measured import (
    MeasuredStep,
    RankTimes,
    executed_table,
    measured_as_text,
    price_as_measured,
    read_measured,
)
from triax.spec.schedule.orders import build
from triax.spec.schedule.price import Timeline, price, unit_cost
from triax.spec.schedule.rules import (
    SCHEDULES,
    ScheduleKind,
    legal,
    schedule_kind,
    splits_backward,
    stage_owner,
)
from triax.spec.schedule.table import Action, Overlap, ScheduleTable, Slot, Visit, validate

__all__ = [
    "SCHEDULES",
    "Action",
    "MeasuredStep",
    "Overlap",
    "RankTimes",
    "ScheduleKind",
    "ScheduleTable",
    "Slot",
    "Timeline",
    "Visit",
    "build",
    "draw",
    "executed_table",
    "legal",
    "measured_as_text",
    "price",
    "price_as_measured",
    "read_measured",
    "schedule_kind",
    "splits_backward",
    "stage_owner",
    "unit_cost",
    "validate",
]
