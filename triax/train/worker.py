"""What does one rank's process do from its first line to its exit code?

Ranks tell of a failure once: the first to fail claims the right to speak in the store that all share. A rank that only
lost its peers leaves the word to whoever knows why.
"""

import logging
import os
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch.distributed import DistError, Store

from triax.data.corpus import Corpus, open_corpus
from triax.errors import TriaxError
from triax.parallel.launch import Process, peers, process_from_environment
from triax.spec.plan import Plan
from triax.train.corpus import share_tokens
from triax.train.loop import train
from triax.train.message import tell, write_anything
from triax.train.run_folder import RunFolder
from triax.train.stop import StopWish, stop_signals

_LOST_PEER: Final = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe")

_GRACE_S: Final = 2.0
"""For how long a rank that only lost its peer leaves the word to whoever knows why the peer died."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a rank is told when its process starts."""

    plan: str
    """The plan as JSON."""
    run_text: str
    """The run file as the user wrote it; empty where there is none."""
    folder: str
    """The run's folder."""
    tokens: str | None
    """Address of the prepared corpus; None: this server's first rank prepares them."""
    quiet: bool = False


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
    logging.basicConfig(format="triax: %(message)s", level=logging.WARNING)
    write_anything()
    plan, folder = Plan.model_validate_json(order.plan), RunFolder(Path(order.folder))
    process: Process | None = None
    store: Store | None = None
    wish = StopWish()
    try:
        with ExitStack() as held:
            held.enter_context(stop_signals(wish))
            process = process_from_environment()
            if process.rank == 0:
                held.enter_context(folder.held_by_rank_0())
            store = held.enter_context(peers(process, plan.run.train.timeout_s))
            corpus = _tokens(order, plan, process, store)
            train(plan, folder, process, corpus, run_text=order.run_text, wish=wish, quiet=order.quiet)
    except TriaxError as error:
        if _speaks(store):
            tell(str(error))
        return error.exit_code
    except Exception as error:
        _tell_of_fault(error, process, store, wish)
        return 1
    return 0


def _tokens(order: Order, plan: Plan, process: Process, store: Store) -> Corpus:
    if order.tokens is not None:
        return open_corpus(order.tokens)
    server = process.rank // process.local_world_size
    return share_tokens(plan.run, store, server, is_first_of_server=process.local_rank == 0)


def _tell_of_fault(error: Exception, process: Process | None, store: Store | None, wish: StopWish) -> None:
    """Say what went wrong where it is no sentence of triax: a peer that is gone, peers that were not met, or a bug."""
    who = f"rank {process.rank}" if process else "this process"
    lost = next((cause for cause in _LOST_PEER if cause in str(error)), None)
    if store is None and isinstance(error, DistError):
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        tell(f"{who} could not meet the other ranks at {where}: {_first_line(error)}")
    elif lost is not None:
        # The agent of this server sees at once which process died, tells this one to stop, and names the other.
        if not wish.is_asked:
            time.sleep(_GRACE_S)
        if not wish.is_asked and _speaks(store):
            tell(f"{who} lost a peer ({lost}); start the same command again to go on from the newest checkpoint.")
    elif _speaks(store):
        sys.stderr.write(f"triax: {who} failed by what nobody foresaw:\n{''.join(traceback.format_exception(error))}")
        sys.stderr.flush()


def _speaks(store: Store | None) -> bool:
    """Return whether this rank is the first that fails; of ranks that cannot know, one of each server speaks."""
    if store is not None:
        try:
            return store.add("triax/failures", 1) == 1
        except RuntimeError:  # the rank that holds the store has left
            pass
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:300]
