"""Which different moments does a pipeline rank go through in a step, as far as memory depends on them?"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from triax.spec.schedule import build

Counts = tuple[int, ...]
"""One for each stage of the rank."""

_ROUNDS: Final = 3
"""Rounds of pp microbatches through all stages after which a pipeline repeats itself."""


@dataclass(frozen=True, slots=True)
class Instant:
    """An action of the schedule, and what has become of the other microbatches."""

    kind: str
    chunk: int
    """Which of the rank's stages runs it."""
    held: Counts
    """Microbatches whose forward is over and whose backward has not begun, without the one that runs."""
    waiting: Counts
    """Microbatches between the two parts of a split backward, without the one that runs."""
    has_gradients: tuple[bool, ...]
    is_first: bool
    """The first forward of the stage, or its first backward."""
    is_last: bool
    """The last backward of the stage."""
    is_over: tuple[bool, ...]
    """The stage has run its last backward."""
    is_open: tuple[bool, ...]
    """What the stage did last was a forward: what stands outside of its layers is gathered."""


@lru_cache(maxsize=4096)
def instants(
    name: str, pp: int, stages_per_rank: int, microbatches: int, rank: int
) -> tuple[tuple[Instant, Counts], ...]:
    """Return each kind of instant of pipeline rank ``rank`` under schedule ``name``, and how many forwards and
    backwards each of its stages has run when it comes for the last time.

    Once a pipeline is full it repeats itself, and only these numbers grow: long steps are walked in part.
    """
    most = microbatches
    if name not in ("GPipe", "LoopedBFS"):
        most = min(microbatches, _ROUNDS * pp * stages_per_rank + microbatches % pp + pp)
    table = build(name, pp, stages_per_rank, most)
    stages = table.stages_of(rank)
    held, waiting, done, begun, back = ([0] * len(stages) for _ in range(5))
    is_open = [False] * len(stages)
    found: dict[Instant, Counts] = {}
    for action in table.actions(rank):
        chunk = stages.index(action.stage)
        if action.kind in ("B", "I"):
            held[chunk] -= 1
        if action.kind == "W":
            waiting[chunk] -= 1
        more = microbatches - most if all(done) else 0
        instant = Instant(
            action.kind, chunk, tuple(held), tuple(waiting), has_gradients=tuple(count > 0 for count in done),
            is_first=(begun if action.kind == "F" else done)[chunk] == 0,
            is_last=action.kind in ("B", "W") and done[chunk] == most - 1,
            is_over=tuple(count == most for count in done), is_open=tuple(is_open),
        )  # fmt: skip
        found[instant] = tuple(count + more for pair in zip(begun, back, strict=True) for count in pair)
        if action.kind == "F":
            held[chunk] += 1
            begun[chunk] += 1
        elif action.kind == "I":
            waiting[chunk] += 1
        else:
            done[chunk] += 1
        back[chunk] += action.kind in ("B", "I")
        is_open[chunk] = action.kind == "F"
    return tuple(found.items())
