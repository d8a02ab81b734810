"""Who hears of what happens to ranks, where they cannot tell it themselves? The run's events, and whoever wants alerts.

Torch-free: the process that started the ranks knows most of it.
"""

from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from triax.errors import BadInput
from triax.spec.layout import Layout
from triax.spec.plan import Plan
from triax.spec.run import Run
from triax.train.alert import Alerts
from triax.train.hang import Hang, HangWatch
from triax.train.message import tell
from triax.train.places import Places
from triax.train.run_folder import RunFolder
from triax.watch.record import RunLog, server_name


class Events:
    """Writes down and sends what a process knows of a run; nothing of it keeps that process waiting, but for the end of
    the ``with``, where alerts that are under way may still arrive."""

    def __init__(self, folder: RunFolder, run: Run, server: str | None = None) -> None:
        """``server``: what this one is called; None: as ``server_name`` says."""
        self.folder, self.server = folder, server or server_name()
        self._alerts = Alerts(run.guard, str(folder.path))

    def record(
        self, layout: Layout | None, kind: str, step: int, rank: int | None, detail: Mapping[str, object]
    ) -> None:
        """Say that ``kind`` happened, to ``rank`` in ``layout`` or to none of its own."""
        coordinate = None if rank is None or layout is None else layout.coordinate(rank)._asdict()
        # Whoever decides what follows must not die of a folder that cannot be written now.
        with (
            suppress(BadInput),
            RunLog(self.folder.path, rank=rank, coordinate=coordinate, server=self.server) as log,
        ):
            log.event(kind, step=step, detail=detail)
        place = {"rank": rank, "coordinate": coordinate or {}, "server": self.server}
        self._alerts.send_event(kind, step, detail, place)

    def hang_watch(self, places: Places, plan: Plan, first_rank: int, num_ranks: int) -> HangWatch:
        """Return who watches whether the ``num_ranks`` ranks of this server move, from ``first_rank`` on; it tells the
        user and records."""

        def told(kind: str, sentence: str, hang: Hang) -> None:
            tell(sentence)
            self.record(plan.layout, kind, hang.odd.step, hang.odd.rank, {"reason": sentence, **hang.detail()})

        return HangWatch(
            places, plan.layout, first_rank, num_ranks, plan.run.watch, self.folder.stacks, self.server, told
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._alerts.close()
