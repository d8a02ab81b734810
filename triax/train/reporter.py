"""How does a run tell what it does: one voice for all ranks, many ears."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from triax.parallel.launch import Process
from triax.parallel.shard import DTYPES
from triax.spec.flops import flops_per_token
from triax.spec.plan import Plan
from triax.train.alert import Alerts
from triax.train.run_folder import RunFolder
from triax.watch.console import Console
from triax.watch.device import DeviceMeter, device_peak
from triax.watch.experts import LoadCheck
from triax.watch.metrics import PeakCheck, PeakFlops, StepRecord, to_metrics
from triax.watch.record import RunLog, server_name
from triax.watch.sinks import Sink, TensorBoardSink, Unfailing


class Reporter:
    """Writes metrics and events, and shows them. Rank 0 speaks; the other ranks only sign events of their own."""

    def __init__(self, plan: Plan, folder: RunFolder, process: Process, attended: float, *, quiet: bool) -> None:
        """``attended``: mean number of positions a token attends to, for the FLOPs of attention."""
        run = plan.run
        self.is_voice, self._folder = process.rank == 0, folder
        self._flops_per_token = flops_per_token(run.model, attended)
        self._num_devices = process.world_size
        self._folder, self._layout = folder, plan.layout
        self._log = RunLog(folder.path, rank=process.rank, coordinate=plan.layout.coordinate(process.rank)._asdict())
        self._sinks: list[Sink] = []
        self._console: Console | None = None
        self._peak = _peak_of_all(plan, process)
        if self.is_voice:
            self._console = Console(run.train.steps, every=run.watch.console_every, quiet=quiet)
            if run.watch.tensorboard:
                self._sinks.append(Unfailing(TensorBoardSink(folder.path / "tensorboard"), "TensorBoard"))
        self._peak_check = PeakCheck(self._peak)
        experts = run.model.experts
        self._load_check = None if experts is None else LoadCheck(experts.num_experts, experts.num_experts_per_tok)
        self._alerts = Alerts(run.guard, str(folder.path))
        self._place: dict[str, object] = {
            "rank": process.rank, "coordinate": plan.layout.coordinate(process.rank)._asdict(),
            "server": server_name(),
        }  # fmt: skip
        self.meter = DeviceMeter(process.device)

    def step(self, record: StepRecord) -> None:
        """Write and show one step."""
        if not self.is_voice:
            return
        self._folder.refuse_superseded()
        metrics = to_metrics(
            record, flops_per_token=self._flops_per_token, num_devices=self._num_devices, peak=self._peak
        )
        warning = self._peak_check.warning(metrics)
        if warning:
            self.warn(warning)
        heavy = None if self._load_check is None else self._load_check.warning(record.step, record.experts)
        if heavy:
            self.warn(heavy)
        self._log.write(metrics)
        if self._console is not None:
            self._console.write(metrics)
        for sink in self._sinks:
            sink.write(metrics)

    def event(self, kind: str, step: int, detail: Mapping[str, object] | None = None) -> None:
        """Write that ``kind`` happened after ``step`` updates; of some kinds somebody is told at once."""
        if not self.is_voice:
            return
        self._folder.refuse_superseded()
        self._log.event(kind, step=step, detail=detail)
        self._alerts.send_event(kind, step, detail or {}, self._place)

    def event_of(self, rank: int, server: str, kind: str, step: int, detail: Mapping[str, object]) -> None:
        """Write that ``kind`` happened to ``rank`` on ``server``, as the one rank that knows it."""
        if self.is_voice:
            coordinate = self._layout.coordinate(rank)._asdict()
            with RunLog(self._folder.path, rank=rank, coordinate=coordinate, server=server) as log:
                log.event(kind, step=step, detail=detail)

    def say(self, text: str) -> None:
        """Show a line."""
        if self._console is not None:
            self._console.say(text)

    def warn(self, text: str) -> None:
        """Show a line that even a quiet run must not hide."""
        if self.is_voice:
            logging.getLogger("triax").warning(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with ExitStack() as closing:
            closing.callback(self._alerts.close)
            closing.callback(self._log.close)
            if self._console is not None:
                closing.callback(self._console.close)
            for sink in self._sinks:
                closing.callback(sink.close)


def _peak_of_all(plan: Plan, process: Process) -> PeakFlops:
    """Return the mean peak of all ranks, which call this together."""
    dtype = DTYPES[plan.run.precision.compute]
    peak = device_peak(plan.cluster.peak_flops, process.device, dtype, num_sharing=process.local_world_size)
    total = torch.tensor(peak.flops_per_s, dtype=torch.float64, device=process.device)
    dist.all_reduce(total)
    return replace(peak, flops_per_s=float(total) / dist.get_world_size())
