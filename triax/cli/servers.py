"""How do several servers train one run, each with this command, and go on when some of them are lost?"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from triax.cli.recover import budget_of, failure_told, memory_freed
from triax.errors import BadInput, Preempted, TriaxError
from triax.spec.check import require_legal
from triax.spec.cluster import Cluster
from triax.spec.plan import Plan, make_plan
from triax.spec.resolve import resolve_layout
from triax.spec.run import LayoutRequest, Run
from triax.units import format_seconds

if TYPE_CHECKING:
    from triax.launch.agent import Place
    from triax.launch.board import Board, Over
    from triax.launch.budget import Budget
    from triax.launch.members import Beat, Generation, View
    from triax.launch.servers import Work
    from triax.launch.workers import Ended, Workers
    from triax.train.events import Events
    from triax.train.places import Failure
    from triax.train.run_folder import RunFolder
    from triax.train.stop import StopWish

_NNODES: Final = re.compile(r"([1-9][0-9]{0,5})(?::([1-9][0-9]{0,5}))?")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Servers:
    """What was said of the servers of a run, and which one this is."""

    fewest: int
    most: int
    name: str
    address: str

    @property
    def interface(self) -> str | None:
        """The network interface that ranks of this server should use; None where it cannot be told."""
        from triax.launch.contacts import interface_of

        return interface_of(self.address)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that tell ranks which server this is, and over which network they meet."""
        from triax.watch.record import SERVER

        interface = self.interface
        network = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        return {SERVER: self.name, **network}


def servers_said(nnodes: str | None, name: str | None, address: str | None) -> Servers | None:
    """Return the same as ``servers_of``; None where one server alone is meant. Raises BadInput likewise."""
    if nnodes is not None:
        return servers_of(nnodes, name, address)
    if name or address:
        raise BadInput("--server and --local-addr say which of several servers this is: give --nnodes with them.")
    return None


def servers_of(nnodes: str, name: str | None, address: str | None) -> Servers:
    """Return what ``--nnodes MIN:MAX``, ``--server`` and ``--local-addr`` say; raise BadInput where they cannot be."""
    import socket

    from triax.launch.contacts import own_address

    match = _NNODES.fullmatch(nnodes)
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= fewest <= most:
        raise BadInput(f"--nnodes {nnodes} is no number of servers: write 4, or 2:4 for at least two and at most four.")
    said = name or socket.gethostname()
    if _NAME.fullmatch(said) is None:
        raise BadInput(f"--server {said[:80]!r} is no name of a server: use letters, digits, dots and dashes.")
    return Servers(fewest, most, said, address or own_address())


@dataclass(slots=True)
class Plans:
    """The plan of a run for each number of servers."""

    run: Run
    cluster: Cluster
    """Of one server or of all: only its numbers are replaced. What a plan has measured of it is kept."""
    ranks: int
    """On each server."""
    folder: "RunFolder"
    has_cards: bool
    _made: dict[int, Plan | BadInput] = field(default_factory=dict)

    def of(self, num_servers: int) -> Plan:
        """Return the plan for ``num_servers``; raise BadInput where the run has no layout for so many ranks.

        Keys of ``[layout]`` stay as they are where that is legal; where it is not, all of it is planned.
        """
        if num_servers not in self._made:
            try:
                self._made[num_servers] = plan = self._plan(num_servers)
                self.cluster = plan.cluster
            except BadInput as error:
                self._made[num_servers] = error
        made = self._made[num_servers]
        if isinstance(made, BadInput):
            raise made
        return made

    def can_train(self, ranks: int) -> bool:
        """Return whether the run has a layout for ``ranks`` on servers of equal size."""
        try:
            self.of(ranks // self.ranks)
        except BadInput:
            return False
        return True

    def _plan(self, num_servers: int) -> Plan:
        cluster = self.cluster.model_copy(update={"servers": num_servers, "cards_per_server": self.ranks})
        try:
            return self._as_said(self.run, cluster)
        except BadInput:
            if self.run.layout == LayoutRequest():
                raise
            return self._as_said(self.run.model_copy(update={"layout": LayoutRequest()}), cluster)

    def _as_said(self, run: Run, cluster: Cluster) -> Plan:
        if run.layout == LayoutRequest():
            from triax.cli.planned import planned

            plan = planned(run, cluster, self.folder, has_cards=self.has_cards)
        else:
            plan = make_plan(run, cluster, resolve_layout(run, cluster.num_cards))
        require_legal(plan.layout, plan.run, plan.cluster)
        return plan


class Deciding:
    """What the agent that decides does besides: it plans, counts failures, waits, and tells."""

    def __init__(self, plans: Plans, events: "Events", servers: Servers, max_restarts: int | None) -> None:
        self._plans, self._events, self._servers, self._max_restarts = plans, events, servers, max_restarts
        self._folder = events.folder
        self._judged = 0
        self._not_before_s = 0.0
        self._budget: Budget | None = None
        self._told = ""

    def prepare(self, bare: "Generation", view: "View") -> "Generation | Over | None":
        """Return ``bare`` with its plan; the end of the run where it has failed for good; None before it is time."""
        from triax.launch.board import Over
        from triax.launch.budget import GivenUp

        if self._judged < bare.number:
            self._judged, self._told = bare.number, ""
            self._not_before_s = 0.0
            self._budget = self._budget_after(view)
            failure = _failure(view) if bare.reason == "failed" else None
            if failure is not None:
                plan = _plan_of(view.generation)
                verdict = self._budget.judge(failure.step, failure.how, self._folder.newest_step() or 0)
                self._told = failure_told(failure, verdict, plan, self._events)
                if isinstance(verdict, GivenUp):
                    return Over(bare.number - 1, 1, self._told)
                self._not_before_s = time.monotonic() + verdict.wait_s
        if time.monotonic() < self._not_before_s:
            return None
        assert self._budget is not None
        plan_text = self._plans.of(len(bare.members)).model_dump_json() if bare.members else ""
        return replace(bare, plan=plan_text, budget=asdict(self._budget.tally))

    def begun(self, new: "Generation", view: "View") -> None:
        """Tell and write down what has become of the servers."""
        from triax.train.message import tell

        record = self._events.record
        before, step = view.generation, self._folder.newest_step() or 0
        plan = _plan_of(new) or self._plans.of(self._servers.most)
        old = {member.server for member in before.members} if before is not None else set()
        now = [member.server for member in new.members]
        detail = {"servers": now, "generation": new.number}
        said = []
        if self._told:
            said.append(self._told)
        if new.reason in ("lost", "too few"):
            lost = sorted(old - set(now)) or sorted(old)
            gone = [name for name in lost if name in view.known and view.known[name].beat.state == "leaving"]
            missed, after_s = [name for name in lost if name not in gone], self._plans.run.recover.lost_after_s
            if gone:
                said.append(f"{_named(gone)} was asked to go, and has gone.")
            if missed:
                said.append(f"lost {_named(missed)}: not heard of, or cut off, for {format_seconds(after_s)}.")
            reason = " ".join(said)
            record(plan.layout, "lost_server", step, None, {"reason": reason, **detail, "lost": lost, "left": gone})
        if new.reason == "grown":
            record(plan.layout, "grown", step, None, {**detail, "new": sorted(set(now) - old)})
            said.append(f"{_named(sorted(set(now) - old))} is there: the run grows.")
        if not now:
            said.append(f"Fewer than {self._servers.fewest} servers are left, and the run waits for more.")
        elif before is not None and before.members:
            origin = f"the checkpoint of step {step}" if step else "the start"
            said.append(f"{_named(now)} {'go' if len(now) > 1 else 'goes'} on from {origin}.")
        earlier = _plan_of(before)
        if now and earlier is not None and earlier.layout != plan.layout:
            words = {"before": earlier.layout.describe(), "after": plan.layout.describe()}
            released = plan.run.layout != self._plans.run.layout
            record(plan.layout, "replan", step, None, {**detail, **words, "released": released})
            said.append(f"Planned anew: {words['after']}, it was {words['before']}.")
        if new.reason in ("failed", "stopped") and now:
            record(plan.layout, "restart", step, None, detail)
        if said:
            tell(" ".join(said))

    def _budget_after(self, view: "View") -> "Budget":
        from triax.launch.budget import Tally

        budget = budget_of(self._plans.run, self._max_restarts)
        if view.generation is not None and view.saw_it_train and view.generation.budget:
            budget.tally = Tally(**view.generation.budget)
        return budget


def _named(servers: list[str]) -> str:
    return f"server {servers[0]}" if len(servers) == 1 else f"servers {', '.join(servers)}"


def _plan_of(generation: "Generation | None") -> Plan | None:
    if generation is None or not generation.plan:
        return None
    return Plan.model_validate_json(generation.plan)


def _failure(view: "View") -> "Failure | None":
    """Return the failure that explains the others: one whose rank is known, and that is no echo.

    None where ranks have only lost those of a server that stopped them, since it could not say that it is there.
    """
    from triax.train.places import Failure

    number = 0 if view.generation is None else view.generation.number
    ended = [known.beat for known in view.known.values() if known.beat.generation == number]
    told = [Failure(**beat.failure) for beat in ended if beat.state == "failed" and beat.failure]
    unknown = Failure("ranks failed, and their server has not said why.", "failed without a word")
    first = min(told, key=lambda failure: (failure.rank is None, not failure.is_told), default=unknown)
    is_echo = first.rank is None and any(beat.state == "stopped" for beat in ended)
    return None if is_echo else first


def train_on_servers(
    run: Run, cluster: Cluster, text: str, folder: "RunFolder", servers: Servers, *, has_cards: bool, quiet: bool,
    max_restarts: int | None,
) -> int:  # fmt: skip
    """Train ``run`` as one of several servers, with as many ranks on each as ``cluster`` says; return the exit code.

    ``has_cards``: this server has accelerators.
    """
    from triax.cli.start import tokens_of
    from triax.launch.workers import warm_up
    from triax.train.events import Events
    from triax.train.stop import StopWish, stop_signals

    plans = Plans(run, cluster, cluster.cards_per_server, folder, has_cards)
    whole = plans.of(servers.most)
    wish = StopWish(folder.stop_file)
    with Events(folder, run, servers.name) as events, stop_signals(wish), folder.shared():
        folder.refuse_another_run(whole)
        warm_up("triax.train.worker", num_ranks=plans.ranks)
        tokens = tokens_of(whole, quiet).address
        board = _board(folder)
        over = _run_agent(board, plans, events, servers, wish, (text, tokens, quiet), max_restarts)
    if over.sentence:
        raise TriaxError(over.sentence)
    if over.code == Preempted.exit_code and over.generation == 0:
        raise Preempted("stopped before the first step, as asked; the same command starts again.")
    return over.code


def _board(folder: "RunFolder") -> "Board":
    from triax.launch.board import Board

    try:
        return Board(folder.agents)
    except OSError as error:
        raise BadInput(
            f"{folder.agents} cannot be written: {error.strerror or error}; give another --run-dir."
        ) from None


def _run_agent(
    board: "Board", plans: Plans, events: "Events", servers: Servers, wish: "StopWish",
    told: tuple[str, str, bool], max_restarts: int | None,
) -> "Over":  # fmt: skip
    from triax.launch.agent import free_port
    from triax.launch.contacts import Contacts
    from triax.launch.members import Beat, Rules
    from triax.launch.pulse import Pulse, new_start
    from triax.launch.servers import ServerAgent

    said = plans.run.recover
    try:
        contacts = Contacts(servers.address)
    except OSError as error:
        raise BadInput(
            f"--local-addr {servers.address} is no address of this server: {error.strerror or error}."
        ) from None
    rules = Rules(servers.fewest, servers.most, said.lost_after_s, said.join_s, plans.can_train)
    me = Beat(servers.name, new_start(), 0, servers.address, contacts.port, plans.ranks)
    _refuse_same_name(board, me)
    deciding = Deciding(plans, events, servers, max_restarts)
    pulse = Pulse(board, rules, contacts, me, deciding.prepare, deciding.begun)
    agent = ServerAgent(
        pulse, (me.server, me.start), wish, _Ranks(plans, events, servers, *told), lambda: free_port(servers.address),
        lost_after_s=said.lost_after_s, shutdown_s=plans.run.train.timeout_s,
    )  # fmt: skip
    pulse.start()
    try:
        with memory_freed(events.folder, plans.run.fingerprint):
            return agent.run()
    finally:
        pulse.stop()
        contacts.close()


def _refuse_same_name(board: "Board", me: "Beat") -> None:
    """Raise BadInput where another agent beats under the name of this one."""
    from triax.launch.pulse import EVERY_S

    def counts() -> dict[str, tuple[str, int]]:
        return {beat.server: (beat.start, beat.count) for beat in board.beats()}

    before = counts().get(me.server)
    if before is None:
        return
    for _ in range(4):
        time.sleep(EVERY_S)
        if counts().get(me.server) != before:
            raise BadInput(
                f"another command takes part in this run as server {me.server}: give each its own name with --server."
            )


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Makes the ranks of a generation on this server."""

    plans: Plans
    events: "Events"
    servers: Servers
    run_text: str
    tokens: str
    quiet: bool

    def __call__(self, generation: "Generation", place: "Place") -> "Work":
        from triax.launch.servers import Work
        from triax.launch.workers import Workers
        from triax.train.order import Order, work
        from triax.train.places import failure_of, make_places

        plan = Plan.model_validate_json(generation.plan)
        folder = self.events.folder
        file = folder.agents / f"places-{self.servers.name}"
        places = make_places(file, place.local_ranks)
        order = Order(
            generation.plan, self.run_text, str(folder.path), self.tokens, self.quiet, str(file), generation.number
        )
        own = self.servers.environment
        environments = [own | environment for environment in place.environments()]
        hangs = self.events.hang_watch(places, plan, place.first_rank, place.local_ranks)

        def start() -> "Workers":
            return Workers(work, order, environments, plan.run.train.timeout_s)

        def failure(ended: "Ended") -> Mapping[str, Any]:
            return asdict(
                hangs.failure or failure_of(places, plan.layout, ended.wordless, place.first_rank, place.local_ranks)
            )

        def watch(others: Sequence[Mapping[str, Any]]) -> tuple[float | None, Mapping[str, Any]]:
            hangs.others = others
            return hangs(), hangs.told()

        return Work(start, failure, watch)
