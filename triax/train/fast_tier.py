"""How does a run keep its newest state in the memory of its servers, and go on from it?

Every process of a run may die at once, but what they wrote into shared memory stays until the server goes. What a
server had is then still with its neighbour.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch import Tensor

from triax.checkpoint.agree import Ranks
from triax.checkpoint.format import Checkpoint
from triax.checkpoint.history import FILE
from triax.checkpoint.memory_find import Memory
from triax.checkpoint.memory_folder import Servers, memory_folder
from triax.checkpoint.memory_save import MemoryWriter
from triax.checkpoint.save import CheckpointWriter
from triax.parallel.launch import Process
from triax.spec.plan import Plan
from triax.train.cadence import Cadence, hardly_felt
from triax.train.reporter import Reporter
from triax.train.run_folder import RunFolder


class FastTier:
    """The copies in memory of one run. All ranks call every method together."""

    def __init__(self, plan: Plan, folder: RunFolder, process: Process, group: dist.ProcessGroup) -> None:
        self._every = plan.run.checkpoint.memory_every_steps
        self._ranks, self._servers = Ranks.of(group), Servers(process.world_size, process.local_world_size)
        self._folder = memory_folder(folder.checkpoints, plan.fingerprint)
        self._memory = Memory(self._folder, folder.checkpoints, self._ranks, self._servers, plan.fingerprint)
        self._history_file = folder.checkpoints / FILE
        self._run = plan.fingerprint
        self._writer: MemoryWriter | None = None
        self._cadence: Cadence | None = None
        self._reporter: Reporter | None = None
        self._why_told = ""

    def newest(self, least_step: int, tensors: Mapping[str, Tensor]) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest state in memory of ``least_step`` or more; see Memory.newest."""
        return self._memory.newest(least_step, tensors)

    def begin(self, writer: CheckpointWriter, step: int, used: Checkpoint | None, reporter: Reporter) -> None:
        """Begin the session of a run that goes on from ``step``; ``used`` is the state in memory that it goes on from.

        Where copies are not wished, those of an earlier session are made to count no more.
        """
        (has_history,) = self._ranks.maxima(self._ranks.rank == 0 and self._history_file.exists())
        if self._every == 0 and not has_history:
            return
        self._reporter = reporter
        if problem := writer.begin_history(step):
            reporter.warn(f"{problem}; no state is kept in memory.")
        exchange = dist.new_group(backend="gloo") if self._servers.number > 1 and self._every != 0 else None
        self._writer = MemoryWriter(
            self._folder, self._ranks, self._servers, exchange, self._run, lambda: writer.history,
            why_off="" if self._every != 0 else "not wished",
        )  # fmt: skip
        self._writer.keep_only(None if used is None else used.folder)
        if self._every != 0:
            self._cadence = Cadence(self._every, hardly_felt, self._ranks, step)

    def is_due(self, step: int) -> bool:
        """Return whether the state after ``step`` steps is to be copied; called once after each step."""
        return self._cadence is not None and self._cadence.is_due(step)

    def leave_out(self, seconds: float) -> None:
        """Count ``seconds`` of this rank as none of a step's."""
        if self._cadence is not None:
            self._cadence.leave_out(seconds)

    def save(self, step: int, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
        """Begin to copy a state."""
        if self._writer is not None:
            self._writer.save(step, tensors, extra)
            self._tell_why_off(step)

    def wait_until_copied(self) -> None:
        """Return when the state that is being copied may be changed."""
        if self._writer is not None:
            self._writer.wait_until_copied()

    def poll(self) -> None:
        """Tell how the copy in flight ended, if it did; does not wait."""
        if self._writer is None or self._cadence is None or self._reporter is None:
            return
        outcome = self._writer.poll()
        if outcome is None:
            return
        self._reporter.event("memory_copy", outcome.step, asdict(outcome))
        self._tell_why_off(outcome.step)
        if (interval := self._cadence.learn(outcome)) is not None:
            self._reporter.event("memory_interval", outcome.step, asdict(interval))
            self._reporter.say(f"copies in memory: {interval.describe()}")

    def end(self) -> None:
        """Remove the copies: the disk has the last state of the run."""
        if self._writer is not None:
            self._writer.close()

    def _tell_why_off(self, step: int) -> None:
        assert self._writer is not None
        assert self._reporter is not None
        why = self._writer.why_off
        if why and why != self._why_told:
            self._why_told = why
            self._reporter.event("memory_off", step, {"reason": why})
            self._reporter.warn(f"no state is kept in memory from step {step} on: {why}.")
