"""What does an agent do again and again? It says that it is there, reads what others say, and decides where it may.

All of it runs on one thread of its own, since a network disk may keep it waiting for as long as it likes: how long ago
the last beat was written is then what the rest of the agent judges by.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Event, Lock, Thread
from typing import Any, Final

from triax.launch.board import Board, Over
from triax.launch.contacts import Contacts
from triax.launch.members import (
    Beat,
    Begin,
    Decision,
    Drain,
    Generation,
    Known,
    Lease,
    Member,
    Rules,
    State,
    TakeLease,
    View,
    decide,
    is_whole,
)

EVERY_S: Final = 0.5

Prepare = Callable[[Generation, "View"], Generation | Over | None]
"""Gives a generation its plan before it begins, on the agent that decides: returns it, or the end of the run, or None
where it is not yet time."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What the board said at the last look."""

    generation: Generation | None = None
    over: Over | None = None
    draining: int = 0
    """The generation whose ranks are to save and stop."""
    standings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """How the ranks stand that run, on each other server of that generation; empty for one that has not told."""


@dataclass(slots=True)
class _Watched:
    beat: Beat
    changed_s: float
    has_changed: bool = False


@dataclass(slots=True)
class _Memory:
    """What one agent remembers of what it has seen."""

    began_s: float
    watched: dict[str, _Watched] = field(default_factory=dict)
    saw_it_train: bool = False
    torn_seen_s: float | None = None
    ended_seen_s: float | None = None
    old_over: int | None = None
    """End of an earlier start of the run, which is none of this one."""


class Pulse:
    """The beat of one agent."""

    def __init__(
        self, board: Board, rules: Rules, contacts: Contacts, beat: Beat, prepare: Prepare,
        begun: Callable[[Generation, View], None],
    ) -> None:  # fmt: skip
        """``beat`` says who this agent is; ``begun`` is told of each generation that this agent has begun."""
        self._board, self._rules, self._contacts = board, rules, contacts
        self._prepare, self._begun = prepare, begun
        self._beat = beat
        self._lock, self._is_over, self._wakes = Lock(), Event(), Event()
        self._memory = _Memory(time.monotonic())
        self._wrote_s = time.monotonic()
        self._heard = Heard()
        self.fault: BaseException | None = None
        """Why the thread has ended, where it did so by a fault."""
        old = board.newest_over()
        self._memory.old_over = None if old is None else old.generation
        self._thread = Thread(target=self._run, name="pulse", daemon=True)

    @property
    def heard(self) -> Heard:
        """What the board said at the last look."""
        return self._heard

    @property
    def silent_s(self) -> float:
        """For how long this agent could not say that it is there."""
        return time.monotonic() - self._wrote_s

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def say(self, state: State, generation: int, failure: Mapping[str, Any] | None = None) -> None:
        """Say from now on what this server's ranks do; others hear it at once."""
        with self._lock:
            self._beat = replace(
                self._beat, state=state, generation=generation, failure=dict(failure or {}), standing={}
            )
        self._wakes.set()

    def stand(self, standing: Mapping[str, Any]) -> None:
        """Say from the next beat on how the ranks of this server stand."""
        with self._lock:
            self._beat = replace(self._beat, standing=dict(standing))

    def meet_at(self, port: int) -> None:
        """Say where ranks could meet on this server."""
        with self._lock:
            self._beat = replace(self._beat, meeting_port=port)

    def end_run(self, over: Over) -> None:
        """Say that the run is over; where the disk is away, members learn it from their own ranks."""
        with suppress(OSError):
            self._board.end(over)

    def pause(self, seconds: float) -> None:
        """Wait a little; what this agent has to say is said meanwhile."""
        self._is_over.wait(seconds)

    def stop(self) -> None:
        """Beat once more, and no more then."""
        self._is_over.set()
        self._wakes.set()
        self._thread.join(2 * EVERY_S)

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._turn()
                self._wakes.wait(EVERY_S)
                self._wakes.clear()
            self._write()
        except BaseException as error:
            self.fault = error

    def _turn(self) -> None:
        try:
            self._read()
            self._act()
            self._write()
        except OSError:  # the disk is away or full: how long it is, ``silent_s`` tells
            return

    def _write(self) -> None:
        with self._lock:
            sees = self._contacts.seen(self._rules.lost_after_s)
            self._beat = beat = replace(self._beat, count=self._beat.count + 1, sees=sees)
        self._board.write_beat(beat)
        self._wrote_s = time.monotonic()

    def _read(self) -> None:
        now_s, memory, me = time.monotonic(), self._memory, self._beat
        for beat in self._board.beats():
            before = memory.watched.get(beat.server)
            if before is None:
                memory.watched[beat.server] = _Watched(beat, now_s)
            elif beat != before.beat:
                memory.watched[beat.server] = _Watched(beat, now_s, has_changed=True)
        others = {name: one for name, one in memory.watched.items() if name != me.server}
        self._contacts.ask({name: (one.beat.address, one.beat.port) for name, one in others.items()})
        generation, over = self._board.newest_generation(), self._board.newest_over()
        if over is not None and over.generation == memory.old_over:
            over = None
        draining = max((one.beat.draining for one in memory.watched.values() if one.has_changed), default=0)
        members = () if generation is None else generation.members
        number = 0 if generation is None else generation.number
        standings = {member.server: self._standing(member, number) for member in members if member.server != me.server}
        self._heard = Heard(generation, over, draining, standings)
        memory.saw_it_train = memory.saw_it_train or any(self._is_there(member) for member in members)
        self._note_ends(generation, now_s)

    def _standing(self, member: Member, number: int) -> Mapping[str, Any]:
        one = self._memory.watched.get(member.server)
        is_of_now = one is not None and one.beat.start == member.start and one.beat.generation == number
        return one.beat.standing if one is not None and is_of_now else {}

    def _is_there(self, member: Member) -> bool:
        one = self._memory.watched.get(member.server)
        return one is not None and one.has_changed and one.beat.start == member.start

    def _note_ends(self, generation: Generation | None, now_s: float) -> None:
        number = 0 if generation is None else generation.number
        beats = [*(one.beat for one in self._memory.watched.values()), self._beat]
        has_ended = any(beat.generation == number and beat.state in ("stopped", "failed") for beat in beats)
        if not (number and has_ended):
            self._memory.ended_seen_s = None
        elif self._memory.ended_seen_s is None:
            self._memory.ended_seen_s = now_s

    def _view(self) -> View:
        now_s, memory, me = time.monotonic(), self._memory, self._beat
        known = {name: Known(w.beat, now_s - w.changed_s, w.has_changed) for name, w in memory.watched.items()}
        known[me.server] = Known(me, now_s - self._wrote_s)
        ended_for_s = 0.0 if memory.ended_seen_s is None else now_s - memory.ended_seen_s
        view = View(
            me.server, known, self._board.newest_lease(), self._heard.generation, memory.saw_it_train,
            now_s - memory.began_s, ended_for_s=ended_for_s,
        )  # fmt: skip
        if view.generation is None or is_whole(view.generation.members, view.alive(self._rules)):
            memory.torn_seen_s = None
        elif memory.torn_seen_s is None:
            memory.torn_seen_s = now_s
        return replace(view, torn_for_s=0.0 if memory.torn_seen_s is None else now_s - memory.torn_seen_s)

    def _act(self) -> None:
        if self._heard.over is not None:
            return
        view = self._view()
        decision: Decision = decide(view, self._rules)
        me = self._beat
        if isinstance(decision, TakeLease):
            self._board.take(Lease(decision.number, me.server, me.start))
        elif isinstance(decision, Drain):
            with self._lock:
                self._beat = replace(self._beat, draining=decision.number)
        elif isinstance(decision, Begin):
            beats = [view.known[name].beat for name in decision.servers]
            members = tuple(Member(beat.server, beat.start, beat.address, beat.ranks) for beat in beats)
            port = beats[0].meeting_port if beats else 0
            bare = Generation(decision.number, decision.fence, members, decision.reason, port)
            prepared = self._prepare(bare, view)
            if isinstance(prepared, Over):
                self._board.end(prepared)
            elif prepared is not None and self._board.begin(prepared):
                self._begun(prepared, view)


def new_start() -> str:
    """Return what tells this start of an agent from every other one."""
    return secrets.token_hex(8)
