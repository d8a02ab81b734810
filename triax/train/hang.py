"""Do the ranks of this server still move, and if not: which one is to blame? Torch-free: the agent asks it.

A rank moves when its phase changes, which it does several times in each microbatch. Where one stands still, those that
need it soon do too, so *no rank has moved* is the sign of a hang, whatever the layout. Only steps are judged by it:
starting, measuring and saving take as long as a disk and a compiler take, and a peer that never comes ends them by
``train.timeout_s``. A process that is stopped is a sign by itself, wherever it is.

Where ranks of other servers belong to the run, all of them stand still in a hang, and one line should name one rank. So
servers tell each other in a few words how theirs stand, and the one speaks that has the rank to blame.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from triax.parallel.flight import ask_for_record
from triax.spec.layout import Layout
from triax.spec.run import WatchSpec
from triax.train.places import Failure, Places
from triax.train.stacks import ProcessState, process_state, stacks_of
from triax.units import format_seconds

_LOOK_S: Final = 0.25
"""How often who watches looks; so a hang is told by the soft limit, and not first looked for then."""
_SOFT_STEPS: Final = 10.0
"""The soft limit in steps, where nobody said it in seconds (*assumed*)."""
_LEAST_SOFT_S: Final = 30.0
_HARD_OVER_SOFT: Final = 4.0
"""The hard limit in soft ones, where nobody said it in seconds (*assumed*): time to look, or for a disk to return."""
_STEPS_TIMED: Final = 20
_HEARD_S: Final = 2.0
"""How old it may be what another server has told: agents write and read twice a second."""
_ASLEEP_S: Final = 5.0
"""Who looks that often and could not for so long was stopped too, as by Ctrl-Z, and has seen nothing."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one rank of this server stands."""

    rank: int
    """Among all ranks."""
    step: int
    phase: str
    is_stepping: bool
    idle_s: float
    """Since its phase last changed."""
    is_waiting: bool
    """It is known to wait for a peer."""


@dataclass(frozen=True, slots=True)
class Summary:
    """How the ranks of one server stand, in a few words that another server can read."""

    idle_s: float
    """Since any of them moved."""
    is_stepping: bool
    """All are inside steps: none is starting, measuring or saving."""
    odd: int
    """The rank that is to blame if they hang, among all ranks."""
    innocence: tuple[bool, bool, bool, int]
    """How little it is to blame, see ``odd_one``."""


_SUMMARY: Final = TypeAdapter(Summary)


def standings(places: Places, first_rank: int, num_ranks: int, now_ns: int | None = None) -> list[Standing]:
    """Return where the ranks of this server stand, from their slots, at ``now_ns`` of the monotonic clock."""
    now_ns = time.monotonic_ns() if now_ns is None else now_ns
    found = []
    for local in range(num_ranks):
        slot = places.slot(local)
        idle_s = max(now_ns - slot.changed_ns, 0) / 1e9 if slot.changed_ns else 0.0
        found.append(
            Standing(first_rank + local, slot.step, slot.phase, slot.is_stepping, idle_s, slot.waits_since_ns > 0)
        )
    return found


def summary(ranks: Sequence[Standing], states: Mapping[int, ProcessState]) -> Summary:
    """Return how ``ranks``, of which there is at least one, stand together."""
    odd = odd_one(ranks, states)
    return Summary(
        min(rank.idle_s for rank in ranks), all(rank.is_stepping for rank in ranks), odd.rank, _innocence(odd, states)
    )


def odd_one(ranks: Sequence[Standing], states: Mapping[int, ProcessState]) -> Standing:
    """Return which of ``ranks`` that stand still keeps the others: one that is stopped; else one that waits for a disk
    or a driver; else of those that do not wait for a peer the one in the earliest step, and there the one that stands
    longest, since the others went on until they needed it."""
    return min(ranks, key=lambda rank: (*_innocence(rank, states), -rank.idle_s))


def _innocence(rank: Standing, states: Mapping[int, ProcessState]) -> tuple[bool, bool, bool, int]:
    state = states.get(rank.rank)
    is_stopped, is_in_kernel = state is not None and state.is_stopped, state is not None and state.is_in_kernel
    return not is_stopped, not is_in_kernel, rank.is_waiting, rank.step


@dataclass(frozen=True, slots=True)
class Hang:
    """Ranks that stand still, and the one that is odd among them."""

    odd: Standing
    state: ProcessState
    ranks: Sequence[Standing]
    stands_s: float
    """For how long none has moved; where one is stopped, for how long that one has not."""

    def sentence(self, layout: Layout, server: str, stacks: str) -> str:
        """Return who stands where and why; ``stacks`` says where the stacks of all are, empty where nowhere."""
        who, how_long = f"{layout.describe_rank(self.odd.rank)} on {server}", format_seconds(self.stands_s)
        others = [rank for rank in self.ranks if rank.rank != self.odd.rank]
        seen = f"; the stacks of all ranks are in {stacks}" if stacks else ""
        if self.state.is_stopped:
            return f"{who} {self.state.words}, for {how_long}, in {self.odd.phase}{seen}."
        if self.state.is_in_kernel:
            what = f"{who} {self.state.words} in {self.odd.phase}"
        elif self.odd.is_waiting:
            what = f"all wait, {who} in {self.odd.phase}, for a rank of another server or for a message that was lost"
        elif others and all(rank.is_waiting for rank in others):
            what = f"{who} stands still in {self.odd.phase}, and all others here wait for a peer"
        else:
            what = f"{who} has stood still the longest, in {self.odd.phase}"
        return f"no rank has moved for {how_long}: {what}{seen}."

    def detail(self) -> dict[str, object]:
        """Return what an event says of it."""
        return {
            "phase": self.odd.phase, "state": self.state.words, "waits_in": self.state.waits_in,
            "stands_s": round(self.stands_s, 3),
            "ranks": [{"rank": rank.rank, "phase": rank.phase, "is_waiting": rank.is_waiting} for rank in self.ranks],
        }  # fmt: skip


@dataclass(slots=True)
class HangWatch:
    """Looks four times a second whether ranks move; asked by whoever waits for them, as often as it likes."""

    places: Places
    layout: Layout
    first_rank: int
    num_ranks: int
    limits: WatchSpec
    folder: Path
    """Where stacks are written."""
    server: str
    tell: Callable[[str, str, Hang], None]
    """Called with ``hang`` or ``hang_over``, a sentence for the user, and the hang."""
    others: Sequence[Mapping[str, Any]] = ()
    """What the other servers of the run have last told of theirs (``told``); empty for one that has told nothing."""
    failure: Failure | None = None
    """Why the ranks must end; None: they need not."""
    _summary: Summary | None = None
    _hang: Hang | None = None
    _next_look_s: float = 0.0
    _last_look_s: float = 0.0
    _awake_s: float = 0.0
    """From when on this process has seen everything."""
    _step: int = 0
    _step_at_s: float = 0.0
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_TIMED))

    def __post_init__(self) -> None:
        self._awake_s = self._last_look_s = time.monotonic()

    def __call__(self) -> float | None:
        """Return 0 where ranks must be ended at once, see ``failure``; else None."""
        now_s = time.monotonic()
        if self.failure is None and now_s >= self._next_look_s:
            if now_s - self._last_look_s > _ASLEEP_S:
                self._awake_s = now_s
            self._look(now_s)
            self._last_look_s = time.monotonic()
            self._next_look_s = self._last_look_s + _LOOK_S
        return None if self.failure is None else 0.0

    def told(self) -> dict[str, Any]:
        """Return what the other servers should know of the ranks of this one, in plain values."""
        return {} if self._summary is None else asdict(self._summary)

    @property
    def soft_s(self) -> float:
        """After how long a hang is told."""
        if self.limits.hang_soft_s is not None:
            return self.limits.hang_soft_s
        return max(_LEAST_SOFT_S, _SOFT_STEPS * median(self._steps_s)) if self._steps_s else _LEAST_SOFT_S

    @property
    def hard_s(self) -> float | None:
        """After how long the ranks start again; None: never."""
        if self.limits.hang_hard_s is not None:
            return self.limits.hang_hard_s or None
        return _HARD_OVER_SOFT * self.soft_s

    @property
    def _judges_steps(self) -> bool:
        """Whether it is known how long a step may take: the first compiles, and meets its peers."""
        return self.limits.hang_soft_s is not None or bool(self._steps_s)

    def _look(self, now_s: float) -> None:
        ranks = standings(self.places, self.first_rank, self.num_ranks, int(now_s * 1e9))
        self._time_steps(min(rank.step for rank in ranks), now_s)
        hang = self._found(ranks, now_s)
        if hang is None:
            if self._hang is not None:
                self.tell("hang_over", "ranks move again.", self._hang)
            self._hang = None
            return
        if self._hang is None:
            self._hang = hang
            self.tell("hang", hang.sentence(self.layout, self.server, self._write_stacks(hang)), hang)
        if self.hard_s is not None and hang.stands_s >= self.hard_s:
            sentence = hang.sentence(self.layout, self.server, "")
            self.failure = Failure(sentence, "stood still", hang.odd.rank, hang.odd.phase)

    def _time_steps(self, step: int, now_s: float) -> None:
        if step > self._step > 0:
            self._steps_s.append((now_s - self._step_at_s) / (step - self._step))
        if step != self._step:
            self._step, self._step_at_s = step, now_s

    def _found(self, ranks: Sequence[Standing], now_s: float) -> Hang | None:
        """Return the hang that there is on this server, by the limits; None where there is none, or another server
        has the rank to blame."""
        seen_s = now_s - self._awake_s
        long_s = min(self.soft_s, _HEARD_S) - _LOOK_S
        states = {rank.rank: process_state(self._pid(rank)) for rank in ranks if min(rank.idle_s, seen_s) >= long_s}
        self._summary = own = summary(ranks, states)
        still = [rank for rank in ranks if min(rank.idle_s, seen_s) >= self.soft_s - _LOOK_S]
        if not still:
            return None
        odd = odd_one(still, states)
        state = states[odd.rank]
        if state.is_stopped:
            return Hang(odd, state, ranks, min(odd.idle_s, seen_s))
        if not (self._judges_steps and len(still) == len(ranks) and own.is_stepping):
            return None
        if self._hang is None and not self._is_here(own):
            return None
        return Hang(odd, state, ranks, min(seen_s, *(rank.idle_s for rank in ranks)))

    def _is_here(self, own: Summary) -> bool:
        """Return whether the ranks of all other servers stand still as well, and none of them is more to blame."""
        for other in map(_heard, self.others):
            if other is None or not other.is_stepping or other.idle_s < self.soft_s - _LOOK_S - _HEARD_S:
                return False
            if (other.innocence, other.odd) < (own.innocence, own.odd):
                return False
        return True

    def _pid(self, rank: Standing) -> int:
        return self.places.slot(rank.rank - self.first_rank).pid

    def _write_stacks(self, hang: Hang) -> str:
        """Write where in its code every rank stands, a file for each, beside what NCCL has recorded; return the folder,
        empty where it cannot be."""
        slots = {rank.rank: self.places.slot(rank.rank - self.first_rank) for rank in hang.ranks}
        files = {slot.pid: slot.stack_file for slot in slots.values() if slot.stack_file is not None}
        asked = {pid: file for pid, file in files.items() if not process_state(pid).is_stopped}
        stacks = stacks_of(asked)
        for number, slot in slots.items():
            ask_for_record(slot.pid, number)
        try:
            self.folder.mkdir(exist_ok=True)
            for rank in hang.ranks:
                pid = slots[rank.rank].pid
                state = process_state(pid)
                head = (
                    f"{self.layout.describe_rank(rank.rank)} on {self.server}: process {pid} {state.words}; in "
                    f"{rank.phase or 'its start'} for {format_seconds(rank.idle_s)}\n"
                )
                silent = "It is stopped and cannot say where.\n" if state.is_stopped else "It does not say where.\n"
                path = self.folder / f"rank-{rank.rank}-step{rank.step}.txt"
                path.write_text(head + (stacks.get(pid) or silent), encoding="utf-8")
        except OSError:  # a full or dead disk may be why they hang
            return ""
        return str(self.folder)


def _heard(told: Mapping[str, Any]) -> Summary | None:
    """Return what another server has told; None where that is nothing, or not in these words."""
    try:
        return _SUMMARY.validate_python(told)
    except ValidationError:
        return None
