"""In which order does each pipeline rank run its forwards and backwards?

A row is the order of one rank. It has no idle slots: idle time is a matter of durations, which ``price`` adds.
The text form of an action is PyTorch's: ``2F0`` is the forward of microbatch 0 through stage 2.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from triax.errors import BadInput
from triax.spec.schedule.rules import legal, stage_owner


@dataclass(frozen=True, slots=True)
class Action:
    """One microbatch through one stage: F forward, B whole backward, or in two parts I input and W weight gradients.

    I frees the rank before it to go on; W can run at any time after I. Stage 0 has no input gradient to hand on, so
    the tables of ``build`` never split its backward.
    """

    stage: int
    kind: Literal["F", "B", "I", "W"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def parts(self) -> tuple["Action", ...]:
        return (self,)


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a backward of different microbatches run as one, so that each can hide the other's communication.

    It starts when both inputs are there, and hands both results on when it ends. ``(0F3;3B1)OVERLAP_F_B`` in text.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @property
    def parts(self) -> tuple[Action, ...]:
        return (self.forward, self.backward)


Slot = Action | Overlap


class Visit(NamedTuple):
    """A slot with the slots of other ranks it waits for, as (rank, position in its row)."""

    rank: int
    position: int
    waits_for: tuple[tuple[int, int], ...]


_ACTION: Final = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,9})")
_OVERLAP: Final = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


@dataclass(frozen=True)
class ScheduleTable:
    """The rows of a schedule: ``rows[rank]`` is what pipeline rank ``rank`` runs, in order."""

    name: str
    pp: int
    stages_per_rank: int
    microbatches: int
    rows: tuple[tuple[Slot, ...], ...]

    @property
    def num_stages(self) -> int:
        return self.pp * self.stages_per_rank

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The pipeline rank that holds each stage, by stage."""
        return stage_owner(self.name, self.pp, self.stages_per_rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that pipeline rank ``rank`` holds, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.owners) if owner == rank)

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield what ``rank`` runs one after the other, overlapped pairs as forward, then backward."""
        for slot in self.rows[rank]:
            yield from slot.parts

    def chunks_held(self, rank: int) -> NDArray[np.int64]:
        """Return how many microbatches ``rank`` keeps while each slot runs: [slots, stages_per_rank, 2].

        The last axis tells microbatches between F and the end of B or I, whose activations are kept whole, from those
        between I and the end of W, of which only what the weight gradients need is kept. The middle axis follows
        ``stages_of``, so bytes are a dot product with the sizes of the stages.
        """
        held = np.zeros((len(self.rows[rank]), self.stages_per_rank, 2), dtype=np.int64)
        now = np.zeros((self.stages_per_rank, 2), dtype=np.int64)
        for index, slot in enumerate(self.rows[rank]):
            for action in slot.parts:
                if action.kind == "F":
                    now[action.stage // self.pp, 0] += 1
            held[index] = now
            for action in slot.parts:
                if action.kind in ("B", "I"):
                    now[action.stage // self.pp, 0] -= 1
                if action.kind == "I":
                    now[action.stage // self.pp, 1] += 1
                if action.kind == "W":
                    now[action.stage // self.pp, 1] -= 1
        return held

    def max_in_flight(self, rank: int) -> int:
        """Return the most microbatches x stages that ``rank`` holds at once, from F to the end of B or W."""
        return int(self.chunks_held(rank).sum(axis=(1, 2)).max())

    @cached_property
    def execution_order(self) -> tuple[Visit, ...]:
        """All slots in an order in which every slot comes after those it waits for.

        Raises BadInput, naming what each rank is stuck at, if there is no such order.
        """
        makers = {
            self._result(action): (rank, index)
            for rank, row in enumerate(self.rows)
            for index, slot in enumerate(row)
            for action in slot.parts
            if action.kind != "W"
        }
        needs = [[[makers.get(result) for result in self._inputs(slot)] for slot in row] for row in self.rows]
        done = [0] * self.pp
        order: list[Visit] = []
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self.rows):
                while done[rank] < len(row):
                    producers = needs[rank][done[rank]]
                    ready = [place for place in producers if place is not None and place[1] < done[place[0]]]
                    if len(ready) < len(producers):
                        break
                    order.append(Visit(rank, done[rank], tuple(place for place in ready if place[0] != rank)))
                    done[rank] += 1
                    moved = True
        stuck = [
            f"rank {rank} at {row[at]}" for rank, (row, at) in enumerate(zip(self.rows, done, strict=True)) if row[at:]
        ]
        if stuck:
            raise BadInput(f"the {self.name} table never ends: each waits for another, {', '.join(stuck)}.")
        return tuple(order)

    def _result(self, action: Action) -> int:
        """A number for what ``action`` hands on: the output of its stage (even), or the gradient of its input (odd)."""
        return 2 * (action.stage * self.microbatches + action.microbatch) + (action.kind != "F")

    def _inputs(self, slot: Slot) -> list[int]:
        """The results that ``slot`` waits for, on its own rank and on others."""
        inputs = []
        a_stage = 2 * self.microbatches
        for action in slot.parts:
            made = self._result(action)
            if action.kind == "F":
                inputs += [made - a_stage] if action.stage > 0 else []
            elif action.kind == "W":
                inputs.append(made)  # what its I has handed on
            else:
                inputs.append(made - 1)  # the output of its own forward
                inputs += [made + a_stage] if action.stage + 1 < self.num_stages else []
        return inputs

    def to_csv(self) -> str:
        """Return one line per rank, as in ``0F0,0F1,0B0,0B1``: the form that PyTorch's runtime loads."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.rows)

    @classmethod
    def from_csv(cls, name: str, text: str) -> "ScheduleTable":
        """Return the table of schedule ``name`` in ``text``, proved by ``validate``; empty cells are passed over.

        Raises BadInput with the line and cell that is no action, or with what ``validate`` finds.
        """
        rows = tuple(
            tuple(_slot(cell.strip(), f"line {number}") for cell in line.split(",") if cell.strip())
            for number, line in enumerate(text.splitlines(), start=1)
        )
        actions = [action for row in rows for slot in row for action in slot.parts]
        if not actions:
            raise BadInput("a schedule table needs a line per pipeline rank, such as 0F0,0B0; this text has no action.")
        num_stages = max(action.stage for action in actions) + 1
        if num_stages % len(rows):
            raise BadInput(
                f"{num_stages} stages cannot be shared evenly by the {len(rows)} lines (ranks) of the table."
            )
        microbatches = max(action.microbatch for action in actions) + 1
        table = cls(name, len(rows), num_stages // len(rows), microbatches, rows)
        validate(table)
        return table


def _slot(text: str, where: str) -> Slot:
    pair = _OVERLAP.fullmatch(text)
    if pair is None:
        return _action(text, where)
    forward, backward = (_action(part.strip(), where) for part in pair.groups())
    return Overlap(forward, backward)


def _action(text: str, where: str) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None:
        raise BadInput(f"{where}: {text!r} is no action: write stage, F, B, I or W, and microbatch, such as 0F3.")
    stage, kind, microbatch = match.groups()
    return Action(int(stage), kind, int(microbatch))  # type: ignore[arg-type]  # the pattern admits the four kinds


def validate(table: ScheduleTable) -> None:
    """Prove that ``table`` is complete and can be run; raise BadInput with the first fault otherwise.

    Proved: the sizes are legal; every rank runs only its own stages; every microbatch passes every stage forward
    exactly once and backward exactly once, as B or as I and W; an overlap pairs a forward with a backward; and all
    slots can be ordered so that each comes after what it waits for, so no rank waits for ever.
    """
    for refusal in legal(table.name, table.pp, table.stages_per_rank, table.microbatches):
        raise BadInput(refusal.message)
    if len(table.rows) != table.pp:
        raise BadInput(f"the {table.name} table has {len(table.rows)} rows for pp={table.pp}.")
    seen: set[Action] = set()
    for rank, row in enumerate(table.rows):
        for slot in row:
            if isinstance(slot, Overlap) and (slot.forward.kind, slot.backward.kind) != ("F", "B"):
                raise BadInput(f"{slot} on rank {rank} must pair a forward with a whole backward.")
            for action in slot.parts:
                if not (0 <= action.stage < table.num_stages and table.owners[action.stage] == rank):
                    raise BadInput(
                        f"{action} is on rank {rank}, which {table.name} does not give stage {action.stage}."
                    )
                if not 0 <= action.microbatch < table.microbatches:
                    raise BadInput(f"{action} on rank {rank} is outside the {table.microbatches} microbatches.")
                if action in seen:
                    raise BadInput(f"{action} is on rank {rank} twice.")
                seen.add(action)
    counts = {kind: {(a.stage, a.microbatch) for a in seen if a.kind == kind} for kind in "FBIW"}
    wanted = table.num_stages * table.microbatches
    if len(counts["F"]) != wanted:
        raise BadInput(f"the {table.name} table has {len(counts['F'])} forwards, not stages x microbatches = {wanted}.")
    if counts["I"] != counts["W"] or counts["B"] & counts["I"] or len(counts["B"] | counts["I"]) != wanted:
        raise BadInput(
            f"the {table.name} table must run each of {wanted} backwards once, as B or as I and W; it has "
            f"{len(counts['B'])} B, {len(counts['I'])} I and {len(counts['W'])} W."
        )
    _ = table.execution_order
