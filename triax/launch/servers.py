"""How does an agent run the ranks of one of several servers? As the newest generation says, and no moment longer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from triax.launch.agent import Place
from triax.launch.board import Over
from triax.launch.members import Generation
from triax.launch.pulse import Pulse
from triax.launch.workers import REQUEUE, Ended, Workers

Order = TypeVar("Order")

_LOOK_S: Final = 0.1
_GRACE_S: Final = 2.0
"""For how long ranks may speak that will train no more."""


class Wish(Protocol):
    """Whether somebody asked for an end."""

    @property
    def has_signal(self) -> bool:
        """This server was asked to go."""

    @property
    def is_asked(self) -> bool:
        """This server was asked to go, or all of the run."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the ranks of a generation do on this server; made anew for each."""

    start: Callable[[], Workers]
    failure: Callable[[Ended], Mapping[str, Any]]
    """Why they have failed, for the agent that decides what follows."""
    watch: Callable[[Sequence[Mapping[str, Any]]], tuple[float | None, Mapping[str, Any]]]
    """Asked ten times a second, with what the other servers have told of theirs: says within how many seconds the ranks
    must have ended, None where they may go on, and what to tell of them."""


class ServerAgent:
    """Runs ranks of one server, generation after generation."""

    def __init__(
        self, pulse: Pulse, me: tuple[str, str], wish: Wish, work: Callable[[Generation, Place], Work],
        free_port: Callable[[], int], *, lost_after_s: float, shutdown_s: float,
    ) -> None:  # fmt: skip
        """``me``: this server's name, and what tells this start from others."""
        self._pulse, self._me, self._wish, self._work, self._free_port = pulse, me, wish, work, free_port
        self._lost_after_s, self._shutdown_s = lost_after_s, shutdown_s
        self._done = 0
        """The newest generation that this agent has run, or has none of its ranks in."""

    def run(self) -> Over:
        """Run ranks until the run is over, or this server is asked to go; return how it ended."""
        self._pulse.meet_at(self._free_port())
        while True:
            if self._pulse.fault is not None:
                raise self._pulse.fault
            heard = self._pulse.heard
            if heard.over is not None:
                return heard.over
            if self._wish.is_asked:
                return self._leave()
            generation = heard.generation
            if generation is None or generation.number <= self._done:
                self._pulse.pause(_LOOK_S)
                continue
            self._done = generation.number
            over = self._take_part(generation)
            if over is not None:
                return over

    def _take_part(self, generation: Generation) -> Over | None:
        """Run the ranks of ``generation`` that belong here; return the end of the run, if this was it."""
        index = generation.place_of(*self._me)
        if index is None:
            return None
        before = generation.members[:index]
        mine, world_size = generation.members[index], sum(member.ranks for member in generation.members)
        first_rank = sum(member.ranks for member in before)
        place = Place(first_rank, mine.ranks, world_size, generation.members[0].address, generation.port)
        work = self._work(generation, place)
        self._pulse.say("running", generation.number)
        workers = work.start()
        try:
            is_ours = self._follow(workers, work, generation)
        finally:
            workers.kill()
        self._pulse.meet_at(self._free_port())
        return self._tell(workers.ended(), work, generation, is_ours)

    def _follow(self, workers: Workers, work: Work, generation: Generation) -> bool:
        """Watch ranks until they have ended; return whether it was by themselves, and not since they were to stop."""
        is_ours = True
        while workers.running:
            workers.wait(_LOOK_S)
            if workers.has_failed:
                workers.stop(_GRACE_S)
            heard = self._pulse.heard
            is_over = heard.generation is not None and heard.generation.number > generation.number
            # Others may think that this server is gone, and go on without it.
            if is_over or self._pulse.silent_s > self._lost_after_s / 2 or self._pulse.fault is not None:
                is_ours = False
                workers.stop(_GRACE_S)
            within_s, standing = work.watch(list(heard.standings.values()))
            self._pulse.stand(standing)
            if within_s is not None:
                workers.stop(within_s)
            if heard.draining == generation.number or self._wish.has_signal:
                workers.stop(self._shutdown_s)
            if heard.over is not None and heard.over.generation == generation.number:
                workers.stop(_GRACE_S if heard.over.code else self._shutdown_s)
        return is_ours

    def _tell(self, ended: Ended, work: Work, generation: Generation, is_ours: bool) -> Over | None:
        """Say how ranks ended; return the end of the run, if it is over by that."""
        number = generation.number
        if is_ours and ended.code in (0, 2, 3):
            over = Over(number, ended.code)
            self._pulse.end_run(over)
            self._pulse.say("over", number)
            return over
        if not is_ours or ended.code == REQUEUE or self._wish.has_signal:
            self._pulse.say("stopped", number)
        else:
            self._pulse.say("failed", number, work.failure(ended))
        return None

    def _leave(self) -> Over:
        """Say that this server goes; where all of the run was asked to stop, say that it is over."""
        over = Over(self._done, REQUEUE)
        if not self._wish.has_signal:
            self._pulse.end_run(over)
        self._pulse.say("leaving", self._done)
        return over
