"""When does every action of a schedule start and end, and how long do ranks idle?"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from triax.spec.schedule.table import ScheduleTable, Slot


@dataclass(frozen=True)
class Timeline:
    """Start and end of every slot in seconds since the first one could start: ``start_s[rank][index]``."""

    table: ScheduleTable
    start_s: tuple[tuple[float, ...], ...]
    end_s: tuple[tuple[float, ...], ...]

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the start of the first slot to the end of the last one on any rank."""
        return max(ends[-1] for ends in self.end_s)

    def busy_s(self, rank: int) -> float:
        """Return the seconds in which ``rank`` computes."""
        return sum(end - start for start, end in zip(self.start_s[rank], self.end_s[rank], strict=True))

    def bubble_fraction(self, rank: int) -> float:
        """Return the share of the makespan in which ``rank`` idles: (p - 1) / (m + p - 1) for uniform 1F1B."""
        return (self.makespan_s - self.busy_s(rank)) / self.makespan_s if self.makespan_s else 0.0

    @property
    def mean_bubble_fraction(self) -> float:
        """The share of all ranks' time that is idle."""
        return sum(map(self.bubble_fraction, range(self.table.pp))) / self.table.pp


def unit_cost(slot: Slot) -> float:
    """Return the textbook durations: forward 1, backward 2, of which input and weight gradients take 1 each."""
    return sum(2.0 if action.kind == "B" else 1.0 for action in slot.parts)


def price(
    table: ScheduleTable,
    cost: Callable[[Slot], float] = unit_cost,
    send_s: float | Callable[[int, int], float] = 0.0,
) -> Timeline:
    """Return when everything happens if each slot starts as soon as its rank is free and its inputs have arrived.

    ``cost(slot)`` is the duration of a slot in seconds; for an ``Overlap`` that of the pair. ``send_s`` is the time
    from the end of a slot to the arrival of its result at another rank, in seconds, or a function of the two pipeline
    ranks; a send does not occupy the sender (it runs on the network while the rank computes), and links are not shared.
    The longest path through the table is thus exact for any durations, uneven stages included. Cost: one pass over
    the slots. Raises BadInput if the table cannot be run to its end.
    """
    delay = send_s if callable(send_s) else lambda _sender, _receiver: send_s
    starts: list[list[float]] = [[] for _ in range(table.pp)]
    ends: list[list[float]] = [[] for _ in range(table.pp)]
    for visit in table.execution_order:
        rank = visit.rank
        start = ends[rank][-1] if ends[rank] else 0.0
        for sender, index in visit.waits_for:
            start = max(start, ends[sender][index] + delay(sender, rank))
        starts[rank].append(start)
        ends[rank].append(start + cost(table.rows[rank][visit.position]))
    return Timeline(table, tuple(map(tuple, starts)), tuple(map(tuple, ends)))
