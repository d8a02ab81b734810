"""What happens when ranks end? The run is over, or all of them start again from the newest checkpoint."""

import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from triax.errors import BadInput, Preempted, TriaxError
from triax.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triax.launch.budget import Budget, GivenUp, Restart
    from triax.spec.plan import Plan
    from triax.spec.run import Run
    from triax.train.hang import Hang, HangWatch
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
    from triax.train.order import work
    from triax.train.places import failure_of, make_places
    from triax.train.stop import StopWish, stop_signals

    ranks, shutdown_s = plan.cluster.num_cards, plan.run.train.timeout_s
    wish, budget = StopWish(folder.stop_file), budget_of(plan.run, max_restarts)

    def asked() -> float | None:
        # Ranks look for the stop file themselves; it is for the pauses between their attempts.
        return shutdown_s if wish.has_signal else None

    with stop_signals(wish):
        while True:
            places = make_places(folder.places, ranks)
            hangs = hang_watch(places, plan, folder, 0, ranks)
            ended = run_workers(work, order, alone(ranks), shutdown_s, asked, hangs)
            if ended.code not in (1, REQUEUE) or (ended.code == REQUEUE and folder.stopped.exists()):
                return ended.code
            if wish.is_asked:
                raise stopped_unsaved(places, ranks)
            failure = hangs.failure or failure_of(places, plan.layout, ended.wordless, 0, ranks)
            restart = restart_after(failure, plan, folder, budget)
            if restart is None:
                return 1
            pause(restart.wait_s, wish)


def hang_watch(places: "Places", plan: "Plan", folder: "RunFolder", first_rank: int, num_ranks: int) -> "HangWatch":
    """Return who watches whether the ``num_ranks`` ranks of this server move, from ``first_rank`` on; it tells the user
    and writes events."""
    from triax.train.hang import HangWatch
    from triax.train.message import tell

    server = socket.gethostname()

    def told(kind: str, sentence: str, hang: "Hang") -> None:
        tell(sentence)
        record(folder, plan, kind, hang.odd.step, hang.odd.rank, hang.detail())

    return HangWatch(places, plan.layout, first_rank, num_ranks, plan.run.watch, folder.stacks, server, told)


def stopped_early() -> Preempted:
    """Return what to raise where a run is stopped that has done nothing yet."""
    return Preempted("stopped before the first step, as asked; the same command starts again.")


def stopped_unsaved(places: "Places", num_ranks: int) -> TriaxError:
    """Return what to raise where ranks ended without saving that had been asked to stop: they do not start again."""
    if not any(places.phase(rank) for rank in range(num_ranks)):
        return stopped_early()
    return TriaxError("the run was asked to stop and could not save its state; the newest checkpoint still stands.")


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


def restart_after(failure: "Failure", plan: "Plan", folder: "RunFolder", budget: "Budget") -> "Restart | None":
    """Tell of ``failure`` and return the restart that follows on it; None where none does and all is told.

    Raises TriaxError where none does, with why.
    """
    from triax.launch.budget import GivenUp
    from triax.train.message import tell

    saved = folder.newest_step() or 0
    verdict = budget.judge(failure.step, failure.how, saved)
    told = failure_told(failure, verdict, plan, folder)
    if isinstance(verdict, GivenUp):
        if failure.is_told and not verdict.reason:
            return None
        raise TriaxError(told)
    record(folder, plan, "restart", saved, None, {"number": verdict.number, "wait_s": verdict.wait_s})
    origin = f"the checkpoint of step {saved}" if saved else "the start"
    tell(f"{told} All ranks go on from {origin} (restart {verdict.number}).")
    return verdict


def failure_told(failure: "Failure", verdict: "Restart | GivenUp", plan: "Plan | None", folder: "RunFolder") -> str:
    """Write down ``failure`` and what follows on it; return what to say of both."""
    from triax.launch.budget import GivenUp

    saved = folder.newest_step() or 0
    record(folder, plan, "failure", failure.step or saved, failure.rank, {"how": failure.how, "phase": failure.phase})
    if isinstance(verdict, GivenUp):
        record(folder, plan, "given_up", saved, failure.rank, {"reason": verdict.reason})
        return " ".join(filter(None, (failure.sentence, verdict.reason, _GO_ON)))
    pause_s = verdict.wait_s
    return f"{failure.sentence} There is a pause of {format_seconds(pause_s)}." if pause_s else failure.sentence


def record(
    folder: "RunFolder", plan: "Plan | None", kind: str, step: int, rank: int | None, detail: "Mapping[str, object]"
) -> None:
    """Write into the run's events that ``kind`` happened, to ``rank`` or to none of its own."""
    from triax.watch.record import RunLog

    coordinate = None if rank is None or plan is None else plan.layout.coordinate(rank)._asdict()
    # Whoever decides what follows must not die of a folder that cannot be written now.
    with suppress(BadInput), RunLog(folder.path, rank=rank, coordinate=coordinate) as log:
        log.event(kind, step=step, detail=detail)
