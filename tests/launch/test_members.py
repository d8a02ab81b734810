"""Do servers agree on who trains, whatever is lost and cut off: one part at a time, the largest, and in the end one?"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.launch.members import (
    Beat,
    Begin,
    Drain,
    Generation,
    Known,
    Lease,
    Member,
    Rules,
    TakeLease,
    View,
    choose,
    decide,
    is_whole,
)

TICK_S = 0.25
LOST_AFTER_S = 4.0
JOIN_S = 5.0
DEAF_S = 2.0
"""After so long without an answer one server does not see another."""


def beat(name: str, sees: str = "", ranks: int = 2) -> Beat:
    return Beat(name, f"{name}1", 1, name, 1, ranks, sees=tuple(sees))


def rules(fewest: int = 1, most: int = 9, **more: object) -> Rules:
    return Rules(fewest, most, LOST_AFTER_S, JOIN_S, **more)  # type: ignore[arg-type]


def alive(links: str, names: str = "abcd") -> dict[str, Beat]:
    """``links``: pairs that see each other, such as ``ab bc``."""
    sees = {name: {other for pair in links.split() if name in pair for other in pair} - {name} for name in names}
    return {name: beat(name, "".join(sorted(sees[name]))) for name in names}


@pytest.mark.parametrize(
    ("links", "before", "expected"),
    [
        ("ab ac ad bc bd cd", "", "abcd"),
        ("ab ac bc", "", "abc"),
        ("ab ac bc", "d", "abc"),
        ("ab cd", "", "ab"),
        ("ab cd", "cd", "cd"),
        ("ab bc cd", "cb", "cb"),
        ("", "", "a"),
        ("", "c", "c"),
        ("ab ac ad bc bd", "", "abc"),
    ],
)
def test_the_largest_part_that_sees_itself(links: str, before: str, expected: str) -> None:
    assert choose(alive(links), rules(), before) == tuple(expected)


def test_no_more_than_allowed_and_those_of_before_first() -> None:
    everyone = alive("ab ac ad bc bd cd")
    assert choose(everyone, rules(most=2), "") == ("a", "b")
    assert choose(everyone, rules(most=2), "dc") == ("d", "c")


def test_as_many_as_have_a_layout() -> None:
    everyone = alive("ab ac ad bc bd cd")
    assert choose(everyone, rules(can_train=lambda ranks: ranks in (2, 4)), "") == ("a", "b")


def test_servers_of_another_size_do_not_join() -> None:
    everyone = {**alive("ab ac bc", "abc"), "c": beat("c", "ab", ranks=3)}
    assert choose(everyone, rules(), "") == ("a", "b")


@given(st.integers(1, 7), st.integers(0, 2**21 - 1), st.sets(st.sampled_from("abcdefg")))
def test_it_is_the_largest_of_all(count: int, bits: int, before: set[str]) -> None:
    """Against every subset there is."""
    names = "abcdefg"[:count]
    pairs = list(combinations(names, 2))
    links = [pair for index, pair in enumerate(pairs) if bits >> index & 1]
    found = choose(alive(" ".join(map("".join, links)), names), rules(), sorted(before & set(names)))

    def is_whole(group: tuple[str, ...]) -> bool:
        return all(pair in links for pair in combinations(sorted(group), 2))

    every = [g for size in range(1, count + 1) for g in combinations(names, size) if is_whole(g)]
    best = min(every, key=lambda g: (-len(g), -len(before & set(g)), g))
    assert sorted(found) == sorted(best)


# A whole world: servers, a disk that all share, links between them


@dataclass
class Server:
    """One agent and its ranks, as simple as they can be."""

    name: str
    number: int = 1
    is_up: bool = True
    has_disk: bool = True
    trains: int = 0
    """Generation of its ranks."""
    state: str = "waiting"
    of: int = 0
    count: int = 0
    draining: int = 0
    began_s: float = 0.0
    wrote_s: float = 0.0
    saw_it_train: bool = False
    torn_seen_s: float | None = None
    ended_seen_s: float | None = None
    seen: dict[str, tuple[Beat, float, bool]] = field(default_factory=dict)
    heard_s: dict[str, float] = field(default_factory=dict)

    @property
    def start(self) -> str:
        return f"{self.name}{self.number}"


class World:
    """What agents do with the decisions, and what an observer who sees everything may say of it."""

    def __init__(self, names: str, fewest: int, seed: int) -> None:
        self.now = 0.0
        self.dice = Random(seed)
        self.servers = {name: Server(name) for name in names}
        self.cut: set[frozenset[str]] = set()
        self.beats: dict[str, Beat] = {}
        self.lease: Lease | None = None
        self.generation: Generation | None = None
        self.all: dict[int, Generation] = {}
        self.rules = Rules(fewest, len(names), LOST_AFTER_S, JOIN_S)
        self.both_s = 0.0
        self.is_careful = True
        """Whether agents that cannot write end their ranks."""

    def kill(self, name: str) -> None:
        self.servers[name].is_up = False
        self.servers[name].trains = 0

    def come_back(self, name: str) -> None:
        if not self.servers[name].is_up:
            self.servers[name] = Server(name, self.servers[name].number + 1, began_s=self.now, wrote_s=self.now)

    def connected(self, one: str, other: str) -> bool:
        both = self.servers[one].is_up and self.servers[other].is_up
        return both and frozenset((one, other)) not in self.cut

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds / TICK_S)):
            self.now += TICK_S
            for name in self.dice.sample(sorted(self.servers), len(self.servers)):
                server = self.servers[name]
                if server.is_up and self.dice.random() < 0.9:  # a busy machine skips a turn
                    self.turn(server)
            self.observe()

    def turn(self, me: Server) -> None:
        for other in self.servers:
            if other != me.name and self.connected(me.name, other):
                me.heard_s[other] = self.now
        if me.has_disk:
            self.read(me)
        if self.now - me.wrote_s > LOST_AFTER_S / 2 and self.is_careful:
            self.end_ranks(me, "stopped")
        self.ranks(me)
        if me.has_disk:
            self.act(me)
            me.count += 1
            sees = tuple(n for n, at_s in me.heard_s.items() if self.now - at_s < DEAF_S)
            self.beats[me.name] = Beat(
                me.name, me.start, me.count, me.name, 1, 2, 1, me.state, me.of, me.draining, sees  # type: ignore[arg-type]
            )  # fmt: skip
            me.wrote_s = self.now

    def read(self, me: Server) -> None:
        for name, said in self.beats.items():
            before = me.seen.get(name)
            if before is None:
                me.seen[name] = (said, self.now, False)
            elif said != before[0]:
                me.seen[name] = (said, self.now, True)
        newest = self.generation
        if newest is None:
            return
        if me.trains and me.trains < newest.number:
            self.end_ranks(me, "waiting")
        if newest.place_of(me.name, me.start) is not None and me.of < newest.number:
            me.trains = me.of = newest.number
            me.state = "running"
        live = {name for name, (said, _, changed) in me.seen.items() if changed}
        if any(m.server in live and me.seen[m.server][0].start == m.start for m in newest.members):
            me.saw_it_train = True

    def end_ranks(self, me: Server, state: str) -> None:
        if me.trains:
            me.trains, me.state = 0, state

    def ranks(self, me: Server) -> None:
        """Ranks lose a peer that is gone or cut off, and stop where they are asked to."""
        if not me.trains:
            return
        members = [m.server for m in self.all[me.trains].members]
        peers = [self.servers[name] for name in members if name != me.name]
        if any(not self.connected(me.name, peer.name) or peer.state == "failed" for peer in peers):
            if self.dice.random() < 0.3:
                self.end_ranks(me, "failed")
        elif any(said.draining == me.trains for said, _, _ in me.seen.values()):
            self.end_ranks(me, "stopped")

    def view(self, me: Server) -> View:
        known = {n: Known(said, self.now - at_s, changed) for n, (said, at_s, changed) in me.seen.items()}
        own = self.beats.get(me.name)
        if own is None or own.start != me.start:
            own = Beat(me.name, me.start, 0, me.name, 1, 2)
        known[me.name] = Known(own, self.now - me.wrote_s)
        generation = self.generation
        ended = False
        if generation is not None:
            ended = any(
                k.beat.generation == generation.number and k.beat.state in ("stopped", "failed") for k in known.values()
            )
        if not ended:
            me.ended_seen_s = None
        elif me.ended_seen_s is None:
            me.ended_seen_s = self.now
        for_s = 0.0 if me.ended_seen_s is None else self.now - me.ended_seen_s
        waited_s = self.now - me.began_s
        view = View(me.name, known, self.lease, generation, me.saw_it_train, waited_s, ended_for_s=for_s)
        if generation is None or is_whole(generation.members, view.alive(self.rules)):
            me.torn_seen_s = None
        elif me.torn_seen_s is None:
            me.torn_seen_s = self.now
        return replace(view, torn_for_s=0.0 if me.torn_seen_s is None else self.now - me.torn_seen_s)

    def act(self, me: Server) -> None:
        decision = decide(self.view(me), self.rules)
        if isinstance(decision, TakeLease) and (self.lease is None or self.lease.number < decision.number):
            self.lease = Lease(decision.number, me.name, me.start)
        elif isinstance(decision, Drain):
            me.draining = decision.number
        elif isinstance(decision, Begin) and (self.generation is None or self.generation.number < decision.number):
            members = tuple(Member(n, me.seen[n][0].start, n, 2) for n in decision.servers)
            self.generation = Generation(decision.number, decision.fence, members, decision.reason)
            self.all[decision.number] = self.generation

    def going_on(self) -> Iterator[Generation]:
        """Generations that could make a step now: all ranks are there and reach each other."""
        for number, generation in self.all.items():
            names = [m.server for m in generation.members]
            are_there = bool(names) and all(self.servers[n].trains == number for n in names)
            if are_there and all(self.connected(one, other) for one, other in combinations(names, 2)):
                yield generation

    def observe(self) -> None:
        going_on = list(self.going_on())
        # An older one reads within a turn or two that it is over, and can write nothing from the first moment on.
        self.both_s = self.both_s + TICK_S if len(going_on) > 1 else 0.0
        assert self.both_s <= 6 * TICK_S, going_on


EVENTS = st.tuples(
    st.sampled_from(["kill", "back", "cut", "heal", "disk off", "disk on", "wait"]),
    st.integers(0, 4), st.integers(0, 4), st.floats(0, 12),
)  # fmt: skip


@settings(max_examples=150)
@given(st.integers(2, 5), st.integers(1, 2), st.lists(EVENTS, max_size=12), st.integers(0, 2**32))
def test_one_part_goes_on_and_in_the_end_the_largest(
    count: int, fewest: int, events: list[tuple[str, int, int, float]], seed: int
) -> None:
    names = "abcde"[:count]
    world = World(names, fewest, seed)
    for kind, first, second, wait_s in events:
        one, other = names[first % count], names[second % count]
        link = frozenset((one, other))
        if kind == "kill":
            world.kill(one)
        elif kind == "back":
            world.come_back(one)
        elif kind in ("disk off", "disk on"):
            world.servers[one].has_disk = kind == "disk on"
        elif kind == "cut" and one != other:
            world.cut.add(link)
        elif kind == "heal":
            world.cut.discard(link)
        world.run(wait_s)
    world.run(60)
    there = [n for n in names if world.servers[n].is_up and world.servers[n].has_disk]
    links = " ".join("".join(sorted(p)) for p in map(frozenset, combinations(there, 2)) if p not in world.cut)
    before = [m.server for m in world.generation.members] if world.generation else []
    largest = choose(alive(links, "".join(there)), world.rules, [n for n in before if n in there])
    going_on = list(world.going_on())
    if len(largest) < fewest:
        assert going_on == []
        return
    (only,) = going_on
    assert only is world.generation
    members = [m.server for m in only.members]
    assert len(members) == len(largest) or not set(members) < set(largest)
    # Nothing happens any more: the same one goes on.
    world.run(30)
    assert list(world.going_on()) == [only]


def test_two_servers_wait_for_each_other_and_no_longer_than_said() -> None:
    world = World("ab", 1, 0)
    world.run(4)
    assert [len(g.members) for g in world.going_on()] == [2]
    world = World("ab", 1, 0)
    world.kill("b")
    world.run(4)
    assert list(world.going_on()) == []
    world.run(4)
    assert [[m.server for m in g.members] for g in world.going_on()] == [["a"]]


@pytest.mark.parametrize("lost", ["a", "b"])
def test_either_of_two_may_be_lost_and_come_back(lost: str) -> None:
    world = World("ab", 1, 1)
    world.run(8)
    world.kill(lost)
    world.run(LOST_AFTER_S + 4)
    assert [[m.server for m in g.members] for g in world.going_on()] == [["b" if lost == "a" else "a"]]
    world.come_back(lost)
    world.run(10)
    (grown,) = world.going_on()
    assert (len(grown.members), grown.reason) == (2, "grown")


@pytest.mark.parametrize("seed", range(5))
def test_a_cut_that_is_seen_bit_by_bit_leaves_the_right_part(seed: int) -> None:
    """Servers miss the one that is cut off one after the other; the wrong two never begin, while half of it is seen."""
    world = World("abc", 1, seed)
    world.run(8)
    world.cut = {frozenset("ab"), frozenset("ac")}
    world.run(LOST_AFTER_S + 8)
    assert [[m.server for m in g.members] for g in world.going_on()] == [["b", "c"]]
    begun = {"".join(m.server for m in g.members) for g in world.all.values()}
    assert begun == {"abc", "bc"}


@pytest.mark.parametrize("is_careful", [True, False])
def test_who_cannot_write_stops_before_others_go_on(is_careful: bool) -> None:
    """Two servers train and reach each other; they lose the disk, and a third one, cut off from them, has it."""
    world = World("abc", 1, 3)
    world.cut = {frozenset("ac"), frozenset("bc")}
    world.run(8)
    assert [[m.server for m in g.members] for g in world.going_on()] == [["a", "b"]]
    world.is_careful = is_careful
    world.servers["a"].has_disk = world.servers["b"].has_disk = False
    if is_careful:
        world.run(LOST_AFTER_S + 8)
        assert [[m.server for m in g.members] for g in world.going_on()] == [["c"]]
    else:  # the observer would have seen it
        with pytest.raises(AssertionError):
            world.run(LOST_AFTER_S + 8)


def test_a_lease_is_for_one_start() -> None:
    """Who came back under the same name decides nothing by the lease of the one before."""
    me = replace(beat("a"), start="a2")
    view = View("a", {"a": Known(me, 0.0)}, Lease(3, "a", "a1"), None)
    assert decide(view, rules()) == TakeLease(4)
