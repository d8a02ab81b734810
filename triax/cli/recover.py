"""What happens when ranks end? The run is over, or all of them start again from the newest checkpoint."""

import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from triax.errors import BadInput, Preempted, TriaxError
from triax.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triax.launch.budget import Budget, GivenUp, Restart
    from triax.spec.plan import Plan
    from triax.spec.run import Run
    from triax.train.events import Events
    from triax.train.order import Order
    from triax.train.places import Failure, Places
    from triax.train.run_folder import RunFolder
    from triax.train.stop import StopWish

_GO_ON: Final = "Start the same command again to go on from the newest checkpoint."

_LOOK_S: Final = 0.1


def keep_training(plan: "Plan", folder: "RunFolder", order: "Order", max_restarts: int | None = None) -> int:
    """Run the ranks of ``plan`` on this server until the run is over; return its exit code.

    ``max_restarts``: instead of what the run file says. Raises TriaxError where ranks fail and another restart is not
    allowed or would not help.
    """
    from triax.launch.agent import alone, run_workers
    from triax.launch.workers import REQUEUE
    from triax.train.events import Events
    from triax.train.order import work
    from triax.train.places import failure_of, make_places
    from triax.train.stop import StopWish, stop_signals

    ranks, shutdown_s = plan.cluster.num_cards, plan.run.train.timeout_s
    wish, budget = StopWish(folder.stop_file), budget_of(plan.run, max_restarts)

    def asked() -> float | None:
        # Ranks look for the stop file themselves; it is for the pauses between their attempts.
        return shutdown_s if wish.has_signal else None

    with Events(folder, plan.run) as events, memory_freed(folder, plan.fingerprint), stop_signals(wish):
        while True:
            places = make_places(folder.places, ranks)
            hangs = events.hang_watch(places, plan, 0, ranks)
            ended = run_workers(work, order, alone(ranks), shutdown_s, asked, hangs)
            if ended.code not in (1, REQUEUE) or (ended.code == REQUEUE and folder.stopped.exists()):
                return ended.code
            if wish.is_asked:
                raise stopped_unsaved(places, ranks, plan, events)
            failure = hangs.failure or failure_of(places, plan.layout, ended.wordless, 0, ranks)
            restart = restart_after(failure, plan, events, budget)
            if restart is None:
                return 1
            pause(restart.wait_s, wish)


def stopped_early() -> Preempted:
    """Return what to raise where a run is stopped that has done nothing yet."""
    return Preempted("stopped before the first step, as asked; the same command starts again.")


def stopped_unsaved(places: "Places", num_ranks: int, plan: "Plan", events: "Events") -> TriaxError:
    """Return what to raise where ranks ended without saving that had been asked to stop: they do not start again."""
    if not any(places.phase(rank) for rank in range(num_ranks)):
        return stopped_early()
    reason = "the run was asked to stop and could not save its state; the newest checkpoint still stands."
    detail = {"reason": reason, "how": "could not save", "phase": ""}
    events.record(plan.layout, "failure", events.folder.newest_step() or 0, None, detail)
    return TriaxError(reason)


@contextmanager
def memory_freed(folder: "RunFolder", run: str) -> "Iterator[None]":
    """Remove, when the body of the ``with`` ends, what ranks of ``run`` have left in the memory of this server.

    Ranks that end well do it themselves. Those that were killed cannot, and nobody else would: the memory would be lost
    to whatever comes after. States of other runs stay.
    """
    from triax.checkpoint.memory_folder import is_ours, memory_folder

    try:
        yield
    finally:
        copies = memory_folder(folder.checkpoints, run)
        if is_ours(copies):
            from triax.checkpoint.memory_clear import clear  # which loads torch

            with suppress(OSError, BadInput):  # the run has ended as it has, also where nothing can be removed
                clear(copies, run)


def pause(seconds: float, wish: "StopWish") -> None:
    """Wait before a restart; raise Preempted where the run is asked to stop meanwhile."""
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        if wish.is_asked:
            raise Preempted("stopped before a restart, as asked; the same command goes on from the newest checkpoint.")
        time.sleep(min(left_s, _LOOK_S))


def budget_of(run: "Run", max_restarts: int | None) -> "Budget":
    """Return the budget that the run file allows, with another limit where ``max_restarts`` says one."""
    from triax.launch.budget import Budget

    said = run.recover
    limit = said.max_restarts if max_restarts is None else max_restarts
    return Budget(limit, said.same_fault, said.backoff_s, said.max_backoff_s)


def restart_after(failure: "Failure", plan: "Plan", events: "Events", budget: "Budget") -> "Restart | None":
    """Tell of ``failure`` and return the restart that follows on it; None where none does and all is told.

    Raises TriaxError where none does, with why.
    """
    from triax.launch.budget import GivenUp
    from triax.train.message import tell

    saved = events.folder.newest_step() or 0
    verdict = budget.judge(failure.step, failure.how, saved)
    told = failure_told(failure, verdict, plan, events)
    if isinstance(verdict, GivenUp):
        if failure.is_told and not verdict.reason:
            return None
        raise TriaxError(told)
    events.record(plan.layout, "restart", saved, None, {"number": verdict.number, "wait_s": verdict.wait_s})
    origin = f"the checkpoint of step {saved}" if saved else "the start"
    tell(f"{told} All ranks go on from {origin} (restart {verdict.number}).")
    return verdict


def failure_told(failure: "Failure", verdict: "Restart | GivenUp", plan: "Plan | None", events: "Events") -> str:
    """Record ``failure`` and what follows on it; return what to say of both."""
    from triax.launch.budget import GivenUp

    layout = None if plan is None else plan.layout
    saved = events.folder.newest_step() or 0
    detail = {"reason": failure.sentence, "how": failure.how, "phase": failure.phase}
    events.record(layout, "failure", failure.step or saved, failure.rank, detail)
    if isinstance(verdict, GivenUp):
        reason = verdict.reason or "No restart was allowed (recover.max_restarts)."
        events.record(layout, "given_up", saved, failure.rank, {"reason": reason})
        return " ".join(filter(None, (failure.sentence, verdict.reason, _GO_ON)))
    pause_s = verdict.wait_s
    return f"{failure.sentence} There is a pause of {format_seconds(pause_s)}." if pause_s else failure.sentence
