"""When did every rank run every action of a step, as it was measured? The same form as what ``price`` predicts."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Final, Self

from pydantic import BeforeValidator, Field, model_validator

from triax.spec.faults import validated
from triax.spec.layout import Layout
from triax.spec.schedule.orders import build
from triax.spec.schedule.price import Timeline, price
from triax.spec.schedule.table import ScheduleTable, Slot
from triax.spec.text_file import parse_json, read_text
from triax.spec.value import Value, as_tuple

_FORMAT_VERSION: Final = 1
_LARGEST_BYTES: Final = 1 << 28

Seconds = Annotated[tuple[float, ...], BeforeValidator(as_tuple)]


class RankTimes(Value):
    """What one rank ran in one step."""

    rank: int = Field(ge=0)
    actions: Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
    """In the text form of schedules: ``0F3`` is the forward of microbatch 3 through stage 0."""
    start_s: Seconds
    end_s: Seconds


class MeasuredStep(Value):
    """The times of all ranks in one step, in seconds since the first of them began."""

    format_version: int = Field(default=_FORMAT_VERSION, ge=1, le=_FORMAT_VERSION)
    step: int = Field(ge=1)
    layout: Layout
    ranks: Annotated[tuple[RankTimes, ...], BeforeValidator(as_tuple)]

    @model_validator(mode="after")
    def _has_all_of_the_schedule(self) -> Self:
        table = executed_table(self.layout)
        if [times.rank for times in self.ranks] != list(range(self.layout.world_size)):
            raise ValueError(
                f"the times of {len(self.ranks)} ranks are not those of ranks 0 to {self.layout.world_size - 1}."
            )
        for times in self.ranks:
            row = tuple(map(str, table.rows[self.layout.coordinate(times.rank).pp]))
            if times.actions != row or not len(row) == len(times.start_s) == len(times.end_s):
                raise ValueError(f"the actions of rank {times.rank} are not those of its row of the schedule.")
        return self

    def timeline(self, rank: int = 0) -> Timeline:
        """Return when the pipeline that ``rank`` belongs to ran what, from its first action on."""
        members = [self.ranks[peer] for peer in self.layout.peers(rank, "pp")]
        first_s = min(min(times.start_s) for times in members)
        return Timeline(
            executed_table(self.layout),
            tuple(tuple(moment - first_s for moment in times.start_s) for times in members),
            tuple(tuple(moment - first_s for moment in times.end_s) for times in members),
        )

    @property
    def pipelines(self) -> Sequence[int]:
        """The first rank of every pipeline: one for each way to sit on the other axes."""
        return [rank for rank in range(self.layout.world_size) if self.layout.coordinate(rank).pp == 0]


def executed_table(layout: Layout) -> ScheduleTable:
    """Return the table of ``layout`` as ranks run it: an overlapped pair is its forward, then its backward."""
    table = build(layout.schedule, layout.pp, layout.stages_per_rank, layout.microbatches)
    rows = tuple(tuple(table.actions(rank)) for rank in range(table.pp))
    return ScheduleTable(table.name, table.pp, table.stages_per_rank, table.microbatches, rows)


def price_as_measured(measured: Timeline, layout: Layout) -> Timeline:
    """Return the table of ``layout`` priced with the mean duration that each kind of action had in each stage: what is
    left between the two is waiting that the table does not know of, such as sends and uneven microbatches."""
    durations: dict[tuple[int, str], list[float]] = {}
    for rank, row in enumerate(measured.table.rows):
        for index, slot in enumerate(row):
            for action in slot.parts:
                seconds = measured.end_s[rank][index] - measured.start_s[rank][index]
                durations.setdefault((action.stage, action.kind), []).append(seconds)
    means = {key: fmean(values) for key, values in durations.items()}

    def cost(slot: Slot) -> float:
        return sum(means[action.stage, action.kind] for action in slot.parts)

    return price(build(layout.schedule, layout.pp, layout.stages_per_rank, layout.microbatches), cost)


def read_measured(path: Path) -> MeasuredStep:
    """Return the measured step in the file at ``path``; raise BadInput where it holds none."""
    return validated(MeasuredStep, parse_json(read_text(path, _LARGEST_BYTES), str(path)), str(path))


def measured_as_text(measured: MeasuredStep) -> str:
    """Return ``measured`` as the text of its file."""
    plain: dict[str, Any] = measured.model_dump(mode="json")
    return json.dumps(plain) + "\n"
