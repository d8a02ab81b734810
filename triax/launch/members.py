"""Who takes part, and when does that change? The rules by which one server decides for all, as plain values.

Nothing here reads a clock, a disk or a network: ``decide`` is a function of what one agent sees. Words: an *agent* is
triax on one server, a *generation* is one set of servers with one plan and one set of rank processes, the *lease* is
the right to begin generations, held by the maker of its highest number while that agent's heart beats.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final, Literal

State = Literal["waiting", "running", "stopped", "failed", "over", "leaving"]
"""waiting: no ranks. running: ranks of ``generation`` run. They have ended: stopped, since somebody asked them to;
failed, by themselves; over, since the run is. leaving: this server was asked to go, and does not come back by
itself."""

_ENDED: Final = ("stopped", "failed", "over")

_SETTLED_AFTER_S: Final = 2.0
"""For how long servers may say what they have seen, before it is decided by: they ask each other once a second, and the
first that tells of a failure may know its echo alone."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What an agent says of itself, again and again."""

    server: str
    start: str
    """Another one each time an agent of this name starts."""
    count: int
    """Grows with each beat: who reads it needs no clock of another server."""
    address: str
    port: int
    """Where this agent answers those that ask whether it is there."""
    ranks: int
    meeting_port: int = 0
    """Where ranks could meet on this server."""
    state: State = "waiting"
    generation: int = 0
    """Of the ranks that ``state`` tells of."""
    draining: int = 0
    """Said by the holder of the lease: the ranks of this generation are to save and stop."""
    sees: tuple[str, ...] = ()
    """Servers that answer this one over the network."""
    failure: Mapping[str, Any] = field(default_factory=dict)
    """Why the ranks have failed."""
    standing: Mapping[str, Any] = field(default_factory=dict)
    """How the ranks stand that run, for agents whose own ranks wait."""


@dataclass(frozen=True, slots=True)
class Known:
    """A beat, and how long ago the reader saw it change, by the reader's own clock."""

    beat: Beat
    age_s: float
    has_changed: bool = True
    """False: it may have been left by an agent that is long gone; then the age is the time for which it was watched."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to begin generations."""

    number: int
    server: str
    start: str


@dataclass(frozen=True, slots=True)
class Member:
    """A server of a generation; its ranks follow those of the members before it."""

    server: str
    start: str
    address: str
    ranks: int


@dataclass(frozen=True, slots=True)
class Generation:
    """One set of servers that train together. Nobody trains for an older one than the newest."""

    number: int
    fence: int
    """Number of the lease by which it was begun."""
    members: tuple[Member, ...]
    reason: str
    port: int = 0
    """Where the ranks meet, at the first member."""
    plan: str = ""
    """As JSON."""
    budget: Mapping[str, Any] = field(default_factory=dict)
    """What the next holder of the lease must know of earlier failures."""

    def place_of(self, server: str, start: str) -> int | None:
        """Return the number of a server among the members; None where it is none of them."""
        found = [index for index, m in enumerate(self.members) if (m.server, m.start) == (server, start)]
        return found[0] if found else None


@dataclass(frozen=True, slots=True)
class Rules:
    """What a run allows."""

    fewest: int
    most: int
    lost_after_s: float
    join_s: float
    can_train: Callable[[int], bool] = lambda ranks: True
    """Whether there is a layout for so many ranks."""


@dataclass(frozen=True, slots=True)
class View:
    """What one agent sees."""

    me: str
    known: Mapping[str, Known]
    """Every beat, its own included: there the age is that of its last successful write."""
    lease: Lease | None
    generation: Generation | None
    saw_it_train: bool = False
    """Whether this agent has seen a member of the generation alive: else it is left from an earlier start."""
    waited_s: float = 0.0
    """How long this agent has waited for the first generation."""
    torn_for_s: float = 0.0
    """How long ago this agent saw that members of the generation are gone, or do not see each other; 0: all do."""
    ended_for_s: float = 0.0
    """How long ago this agent saw the first member whose ranks have ended; 0: none has."""

    def alive(self, rules: Rules) -> dict[str, Beat]:
        """Return the beats of servers that are there and stay."""
        return {
            name: known.beat
            for name, known in self.known.items()
            if known.has_changed and known.age_s < rules.lost_after_s and known.beat.state != "leaving"
        }

    def is_held(self, lease: Lease, rules: Rules) -> bool:
        """Return whether the agent that made ``lease`` may still be there."""
        known = self.known.get(lease.server)
        if known is None or known.beat.start != lease.start or known.beat.state == "leaving":
            return False
        return known.age_s < rules.lost_after_s


@dataclass(frozen=True, slots=True)
class TakeLease:
    """Make the lease of this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin the generation of this number. No members: too few are there, and all wait."""

    number: int
    fence: int
    servers: tuple[str, ...]
    reason: Literal["start", "lost", "failed", "stopped", "grown", "too few"]


@dataclass(frozen=True, slots=True)
class Drain:
    """Let the ranks of the generation save and stop, so that a larger one can follow."""

    number: int


Decision = TakeLease | Begin | Drain | None


def decide(view: View, rules: Rules) -> Decision:
    """Return what this agent has to do for all, most often nothing."""
    if view.known[view.me].age_s > rules.lost_after_s / 2:
        return None  # others may think that it is gone
    lease = view.lease
    if lease is None or not view.is_held(lease, rules):
        return TakeLease(1 if lease is None else lease.number + 1)
    if lease.server != view.me:
        return None
    return _decide_as_holder(view, rules, view.alive(rules), lease.number)


def _decide_as_holder(view: View, rules: Rules, alive: Mapping[str, Beat], fence: int) -> Decision:
    generation = view.generation
    number, members = (1, ()) if generation is None else (generation.number + 1, generation.members)
    here = [m.server for m in members if m.server in alive and alive[m.server].start == m.start]
    chosen = choose(alive, rules, here)
    is_enough = len(chosen) >= rules.fewest
    if not here and not view.saw_it_train:
        is_time = len(chosen) == rules.most or view.waited_s >= rules.join_s
        return Begin(number, fence, chosen, "start") if is_enough and is_time else None
    if not members:
        return Begin(number, fence, chosen, "lost") if is_enough else None
    if not is_whole(members, alive):
        if view.torn_for_s < _SETTLED_AFTER_S:
            return None  # servers miss others one after the other, and half of it might choose the wrong part
        return Begin(number, fence, chosen if is_enough else (), "lost" if is_enough else "too few")
    ended = {name for name in here if alive[name].generation == number - 1 and alive[name].state in _ENDED}
    if not ended:
        return Drain(number - 1) if set(here) < set(chosen) else None
    states = {alive[name].state for name in ended}
    if "over" in states:
        return None
    is_settled = len(ended) == len(here) or ("failed" in states and view.ended_for_s >= _SETTLED_AFTER_S)
    # A server that is gone made the others fail, and has not been missed yet: it must be heard of once more.
    if not is_settled or any(view.known[name].age_s >= view.ended_for_s for name in here):
        return None
    if "failed" in states:
        return Begin(number, fence, chosen, "failed")
    return Begin(number, fence, chosen, "grown" if len(chosen) > len(here) else "stopped")


def is_whole(members: Sequence[Member], alive: Mapping[str, Beat]) -> bool:
    """Return whether all ``members`` are there, as they were when their generation began, and see each other."""
    names = [m.server for m in members if m.server in alive and alive[m.server].start == m.start]
    return len(names) == len(members) and _all_see(names, alive)


def choose(alive: Mapping[str, Beat], rules: Rules, before: Iterable[str]) -> tuple[str, ...]:
    """Return the largest set of servers that all see each other and can train together, at most as many as allowed.

    Of equally large ones that with most of the servers ``before``, then that with the smallest names. So of parts that
    do not see each other one alone goes on. The order is that of ``before``, then of names: ranks keep their servers.
    """
    order = {name: index for index, name in enumerate(before)}
    names = sorted(alive, key=lambda name: (order.get(name, len(order)), name))
    apart = {
        name: {other for other in names if other != name and not _see(alive[name], alive[other])} for name in names
    }
    best: tuple[str, ...] = ()
    for group in _groups(names, apart):
        fitting = group[: rules.most]
        while fitting and not rules.can_train(sum(alive[name].ranks for name in fitting)):
            fitting = fitting[:-1]
        if _rank(fitting, order) > _rank(best, order) or (
            _rank(fitting, order) == _rank(best, order) and sorted(fitting) < sorted(best)
        ):
            best = fitting
    return best


def _rank(group: tuple[str, ...], order: Mapping[str, int]) -> tuple[int, int]:
    return len(group), sum(name in order for name in group)


def _groups(names: Sequence[str], apart: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Return sets of ``names`` of which none are ``apart``: the largest, and some that are as large.

    Few servers are apart from many. Either the one that is apart from most belongs to the set, and none of those do, or
    it does not.
    """
    inside = set(names)
    worst = max(names, key=lambda name: len(apart[name] & inside), default=None)
    if worst is None or not apart[worst] & inside:
        return [tuple(names)]
    found = _groups([name for name in names if name not in apart[worst]], apart)
    if len(names) - 1 >= max(map(len, found)):
        found += _groups([name for name in names if name != worst], apart)
    return found


def _all_see(names: Sequence[str], alive: Mapping[str, Beat]) -> bool:
    return all(_see(alive[one], alive[other]) for one, other in combinations(names, 2))


def _see(one: Beat, other: Beat) -> bool:
    """Whether two servers can train together: messages pass both ways, and they have equally many ranks."""
    return one.server in other.sees and other.server in one.sees and one.ranks == other.ranks
