"""What does one rank's process do from its first line to its exit code?

Ranks tell of a failure once: the first to fail claims the right to speak in the store that all share, and the others,
which only lost their peers, leave in silence.
"""

import logging
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import Store

from triax.data.corpus import open_corpus
from triax.errors import TriaxError
from triax.parallel.launch import Process, peers, process_from_environment
from triax.spec.plan import Plan
from triax.train.corpus import share_tokens
from triax.train.loop import train
from triax.train.run_folder import RunFolder

_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe")


@dataclass(frozen=True, slots=True)
class Order:
    """What a rank is told when its process starts."""

    plan: str
    """The plan as JSON."""
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
    plan = Plan.model_validate_json(order.plan)
    store: Store | None = None
    process: Process | None = None
    try:
        process = process_from_environment()
        with peers(process, plan.run.train.timeout_s) as store:
            if order.tokens is not None:
                tokens = open_corpus(order.tokens)
            else:
                server = process.rank // process.local_world_size
                tokens = share_tokens(plan.run, store, server, is_first_of_server=process.local_rank == 0)
            train(plan, RunFolder(Path(order.folder)), process, tokens, quiet=order.quiet)
    except TriaxError as error:
        _say(str(error), store, process)
        return error.exit_code
    except Exception as error:
        lost = next((cause for cause in _LOST_PEER if cause in str(error)), None)
        rank = process.rank if process else 0
        _say(f"rank {rank} lost a peer ({lost})." if lost else traceback.format_exc(), store, process)
        return 1
    return 0


def _say(message: str, store: Store | None, process: Process | None) -> None:
    if store is None or _is_first(store, process):
        sys.stderr.write(f"triax: {message}\n")
        sys.stderr.flush()


def _is_first(store: Store, process: Process | None) -> bool:
    try:
        return store.add("triax/failures", 1) == 1
    except RuntimeError:
        return process is not None and process.rank == 0
