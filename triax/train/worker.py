"""What does one rank's process do from its first line to its exit code?

Ranks tell of a failure once. The first that fails by a fault of its own claims the right to speak in the store that all
share. A rank that only lost a peer is an echo: it leaves its last word with the process that started it, which knows
who was killed and who never answered; where nobody waits for it, as under torchrun, it leaves the word to whoever knows
more, and speaks then.
"""

import faulthandler
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch.distributed import DistError, Store

from triax.data.corpus import Corpus, open_corpus
from triax.errors import BadInput, TriaxError
from triax.parallel.flight import flight_recorder
from triax.parallel.launch import Process, peers, process_from_environment
from triax.parallel.progress import Progress
from triax.spec.layout import Layout
from triax.spec.plan import Plan
from triax.train.corpus import share_tokens
from triax.train.events import Events
from triax.train.loop import train
from triax.train.message import tell, write_anything
from triax.train.order import Order
from triax.train.places import NO_ANSWER, Places, open_places
from triax.train.run_folder import RunFolder, what_differs
from triax.train.stacks import stack_on_request
from triax.train.stop import StopWish, stop_signals
from triax.units import format_seconds

_TIMED_OUT: Final = ("Timed out", "wait timeout")
_PEER_GONE: Final = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
"""What torch says in gloo's words where a peer does not answer, and where it has gone."""

_GRACE_S: Final = 2.0
"""For how long an echo that nobody waits for leaves the word to whoever knows why the peer died."""

_PLAN_KEY: Final = "triax/plan"
_GO_ON: Final = "start the same command again to go on from the newest checkpoint."


@dataclass(frozen=True, slots=True)
class Rank:
    """What a rank has once it has met its peers."""

    process: Process
    store: Store
    progress: Progress
    wish: StopWish
    take_place: Callable[[Layout], None]
    """To be told of the layout where it was not known before."""


def leave(code: int) -> None:
    """End the process now: after a failed collective, gloo's own threads would turn a normal exit into an abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def train_as_rank(order: Order) -> int:
    """Train as the rank that the environment says; return the exit code, with one message for all ranks."""
    own, folder = Plan.model_validate_json(order.plan), RunFolder(Path(order.folder), order.generation)

    def body(rank: Rank) -> None:
        plan = _plan_of_all(own, rank) if order.asks_rank_0 else own
        if rank.process.rank == 0:
            rank.wish.file = folder.stop_file
        corpus = _tokens(order, plan, rank)
        train(
            plan, folder, rank.process, corpus, run_text=order.run_text, wish=rank.wish, progress=rank.progress,
            quiet=order.quiet,
        )  # fmt: skip

    @contextmanager
    def holding(process: Process) -> Iterator[None]:
        with ExitStack() as held:
            if process.rank == 0 and order.generation is None:
                held.enter_context(folder.held_by_rank_0())
            if process.device.type == "cuda":
                held.enter_context(flight_recorder(folder.stacks, process.rank))
            yield

    def failed(rank: int, layout: Layout | None, phase: str, reason: str) -> None:
        with Events(folder, own.run) as events:
            detail = {"reason": reason, "how": "failed", "phase": phase}
            events.record(layout, "failure", folder.newest_step() or 0, rank, detail)

    known = None if order.asks_rank_0 else own.layout
    return run_as_rank(body, known, own.run.train.timeout_s, order.places, holding, failed)


def _plan_of_all(own: Plan, rank: Rank) -> Plan:
    """Return this rank's run in rank 0's layout; raise BadInput where rank 0 was started with another run."""
    rank.progress.enter("the wait for rank 0's plan")
    if rank.process.rank == 0:
        rank.store.set(_PLAN_KEY, own.model_dump_json())
    told = Plan.model_validate_json(rank.store.get(_PLAN_KEY).decode())
    if told.fingerprint != own.fingerprint:
        differing = what_differs(told.run.mathematics(), own.run)
        raise BadInput(f"rank 0 trains another run than this rank ({differing}): start all with the same run file.")
    rank.take_place(told.layout)
    # Where tokens and checkpoints lie may be called otherwise on another server.
    return told.model_copy(update={"run": own.run})


def _tokens(order: Order, plan: Plan, rank: Rank) -> Corpus:
    if order.tokens is not None:
        return open_corpus(order.tokens)
    rank.progress.enter("the wait for prepared tokens")
    process = rank.process
    server = process.rank // process.local_world_size
    return share_tokens(plan.run, rank.store, server, is_first_of_server=process.local_rank == 0)


def _holding_nothing(_process: Process) -> AbstractContextManager[None]:
    return nullcontext()


def _telling_nobody(_rank: int, _layout: Layout | None, _phase: str, _reason: str) -> None:
    pass


def run_as_rank(
    body: Callable[[Rank], None], layout: Layout | None, timeout_s: float, places_file: str | None = None,
    holding: Callable[[Process], AbstractContextManager[None]] = _holding_nothing,
    failed: Callable[[int, Layout | None, str, str], None] = _telling_nobody,
) -> int:  # fmt: skip
    """Run ``body`` as the rank that the environment says, among peers that answer within ``timeout_s``; return the exit
    code.

    ``layout`` tells where the rank stands; None: ``body`` will say. What ``holding`` returns is held from before the
    meeting to the end. ``failed`` is told of a failure, with rank, layout, phase and reason, by the one rank that
    speaks of it, where no process waits that knows more.
    """
    logging.basicConfig(format="triax: %(message)s", level=logging.WARNING)
    write_anything()
    # What failed is told in one sentence: without the schedule, and without the stacks of all threads at an abort.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    faulthandler.disable()
    voice = _Voice(layout, failed)
    try:
        with ExitStack() as held:
            held.enter_context(stop_signals(voice.wish))
            process = voice.process = process_from_environment()
            voice.places = None if places_file is None else open_places(Path(places_file))
            slot = None if voice.places is None else voice.places.slot(process.local_rank)
            if slot is not None:
                slot.sign(os.getpid(), held.enter_context(stack_on_request()))
            voice.progress = Progress(slot, process.device)
            held.enter_context(holding(process))
            voice.progress.enter("the meeting of all ranks")
            voice.store = held.enter_context(peers(process, timeout_s))
            voice.progress.enter("the start")
            body(Rank(process, voice.store, voice.progress, voice.wish, voice.take_place))
    except TriaxError as error:
        voice.tell(str(error), is_failure=error.exit_code == TriaxError.exit_code)
        return error.exit_code
    except Exception as error:
        echo = _echo(error, timeout_s)
        if voice.store is None and isinstance(error, DistError):
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            voice.tell(f"{voice.who} could not meet the other ranks at {where}: {_first_line(error)}")
        elif echo is None:
            voice.tell_trace(error)
        else:
            voice.tell_echo(echo)
        return 1
    return 0


class _Voice:
    """How a rank tells of its failure, with what it knows by then."""

    def __init__(self, layout: Layout | None, failed: Callable[[int, Layout | None, str, str], None]) -> None:
        self._failed = failed
        self.layout, self.progress, self.wish = layout, Progress(), StopWish()
        self.process: Process | None = None
        self.store: Store | None = None
        self.places: Places | None = None

    @property
    def who(self) -> str:
        if self.process is None:
            return "this process"
        rank = self.process.rank
        return f"rank {rank}" if self.layout is None else self.layout.describe_rank(rank)

    def take_place(self, layout: Layout) -> None:
        """Learn which layout the rank has a place in."""
        self.layout = layout

    def tell(self, message: str, *, is_failure: bool = True) -> None:
        """Tell of a fault of this rank's own, unless another rank has told of one; a wish, a mistake of the user's and
        a stop by the guard are no failure."""
        self._end_as_told(message)
        if self._speaks():
            tell(message)
            if is_failure:
                self._record(message)

    def tell_trace(self, error: Exception) -> None:
        """Tell of a fault that nobody foresaw, with where it is in the code."""
        self._end_as_told(f"{type(error).__name__}: {_first_line(error)}")
        if self._speaks():
            trace = "".join(traceback.format_exception(error))
            sys.stderr.write(f"triax: {self.who} failed by what nobody foresaw during {self.progress.phase}:\n{trace}")
            sys.stderr.flush()
            self._record(f"{self.who}: {type(error).__name__}: {_first_line(error)}")

    def tell_echo(self, what: str) -> None:
        """Tell that this rank lost a peer: to who waits for it, else to everybody."""
        message = f"{self.who} {what} during {self.progress.phase}"
        if self.places is not None and self.process is not None:
            self.places.end(self.process.local_rank, "lost", message)
            return
        # The agent of this server sees at once which process died, tells this one to stop, and names the other.
        if not self.wish.is_asked:
            time.sleep(_GRACE_S)
        if not self.wish.is_asked and self._speaks():
            tell(f"{message}; {_GO_ON}")
            self._record(message)

    def _record(self, reason: str) -> None:
        if self.places is None and self.process is not None:
            self._failed(self.process.rank, self.layout, self.progress.phase, reason)

    def _end_as_told(self, what: str) -> None:
        if self.places is not None and self.process is not None:
            self.places.end(self.process.local_rank, "told", what.split("\n")[0])

    def _speaks(self) -> bool:
        """Return whether this rank is the first that fails; of ranks that cannot know, one of each server speaks."""
        if self.store is not None:
            try:
                return self.store.add("triax/failures", 1) == 1
            except RuntimeError:  # the rank that holds the store has left
                pass
        return os.environ.get("LOCAL_RANK", "0") == "0"


def _echo(error: BaseException, timeout_s: float) -> str | None:
    """Return in words what ``error`` tells of a peer; None where it is not about one."""
    for cause in _chain(error):
        text = str(cause)
        if any(word in text for word in _PEER_GONE):
            return "lost a peer"
        if any(word in text for word in _TIMED_OUT):
            return f"{NO_ANSWER} for {format_seconds(timeout_s)}"
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error`` and what it came from: torch wraps what happens inside a stage."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:300]
