"""What does one rank's process do from its first line to its exit code?

Ranks tell of a failure once. The first that fails by a fault of its own claims the right to speak in the store that all
share. A rank that only lost a peer is an echo: it leaves its last word with the process that started it, which knows
who was killed and who never answered; where nobody waits for it, as under torchrun, it speaks like any other.
"""

import faulthandler
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch.distributed import Store

from triax.data.store import open_store
from triax.errors import TriaxError
from triax.parallel.launch import Process, peers, process_from_environment
from triax.parallel.progress import Progress
from triax.spec.layout import Layout
from triax.spec.plan import Plan
from triax.train.corpus import share_tokens
from triax.train.loop import train
from triax.train.places import NO_ANSWER, Places, open_places
from triax.train.run_folder import RunFolder
from triax.units import format_seconds

_TIMED_OUT: Final = ("Timed out", "wait timeout")
_PEER_GONE: Final = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
"""What torch says in gloo's words where a peer does not answer, and where it has gone."""

_ECHO_AFTER_S: Final = 1.0
"""An echo leaves so much later, since torchelastic tells of one worker alone: the first it finds dead should be the one
that explains the others."""

Body = Callable[[Process, Store, Progress], None]
"""What a rank does among its peers."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a rank is told when its process starts."""

    plan: str
    """The plan as JSON."""
    folder: str
    """The run's folder."""
    tokens: str | None
    """Folder of prepared tokens; None: this server's first rank prepares them."""
    quiet: bool = False
    places: str | None = None
    """File of ``triax.train.places``; None: nobody waits for this rank's last word."""


def work(order: Order) -> None:
    """Train as one of several local ranks; leave the process with the exit code where it is not 0."""
    code = train_as_rank(order)
    if code:
        leave(code)


def leave(code: int) -> None:
    """End the process now: after a failed collective, gloo's own threads would turn a normal exit into an abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def train_as_rank(order: Order) -> int:
    """Train as the rank that the environment says; return the exit code, with one message for all ranks."""
    plan = Plan.model_validate_json(order.plan)

    def body(process: Process, store: Store, progress: Progress) -> None:
        if order.tokens is not None:
            tokens = open_store(Path(order.tokens))
        else:
            progress.enter("the wait for prepared tokens")
            server = process.rank // process.local_world_size
            tokens = share_tokens(plan.run, store, server, is_first_of_server=process.local_rank == 0)
        train(plan, RunFolder(Path(order.folder)), process, tokens, quiet=order.quiet, progress=progress)

    return run_as_rank(body, plan.layout, plan.run.train.timeout_s, order.places)


def run_as_rank(body: Body, layout: Layout, timeout_s: float, places_file: str | None = None) -> int:
    """Run ``body`` as the rank that the environment says, among peers that answer within ``timeout_s``; return the exit
    code. ``layout`` tells where the rank stands."""
    logging.basicConfig(format="triax: %(message)s", level=logging.WARNING)
    # What failed is told in one sentence: without the schedule, and without the stacks of all threads at an abort.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    faulthandler.disable()
    voice = _Voice(layout)
    try:
        process = voice.process = process_from_environment()
        if places_file is not None:
            voice.places = open_places(Path(places_file))
            voice.progress = Progress(voice.places.phase_slot(process.local_rank), process.device)
        else:
            voice.progress = Progress(device=process.device)
        voice.progress.enter("the meeting of all ranks")
        with peers(process, timeout_s) as store:
            voice.store = store
            voice.progress.enter("the start")
            body(process, store, voice.progress)
    except TriaxError as error:
        voice.tell(str(error))
        return error.exit_code
    except Exception as error:
        echo = _echo(error, timeout_s)
        if echo is None:
            voice.tell(f"{voice.who} failed during {voice.progress.phase}:\n{traceback.format_exc().rstrip()}")
        else:
            voice.tell_echo(echo)
        return 1
    return 0


class _Voice:
    """How a rank tells of its failure, with what it knows by then."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.progress = layout, Progress()
        self.process: Process | None = None
        self.store: Store | None = None
        self.places: Places | None = None

    @property
    def who(self) -> str:
        return self.layout.describe_rank(self.process.rank) if self.process is not None else "a rank"

    def tell(self, message: str) -> None:
        """Tell of a fault of this rank's own, unless another rank has told of one."""
        if self.places is not None and self.process is not None:
            self.places.end(self.process.local_rank, "told")
        self._speak(message)

    def tell_echo(self, what: str) -> None:
        """Tell that this rank lost a peer: to who waits for it, else to everybody."""
        message = f"{self.who} {what} during {self.progress.phase}"
        if self.places is not None and self.process is not None:
            self.places.end(self.process.local_rank, "lost", message)
            time.sleep(_ECHO_AFTER_S)
        else:
            self._speak(f"{message}.")

    def _speak(self, message: str) -> None:
        if self.store is None or self._is_first(self.store):
            sys.stderr.write(f"triax: {message}\n")
            sys.stderr.flush()

    def _is_first(self, store: Store) -> bool:
        try:
            return store.add("triax/failures", 1) == 1
        except RuntimeError:
            return self.process is not None and self.process.rank == 0


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
