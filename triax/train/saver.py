"""When the state of a run is saved, what goes to disk, and who hears how it went?"""

import time
from collections.abc import Sequence
from dataclasses import asdict

from triax.checkpoint.save import CheckpointWriter, SaveOutcome
from triax.checkpoint.store import Uploader
from triax.nn.decoder import Decoder
from triax.spec.plan import Plan
from triax.train.cadence import Cadence
from triax.train.fast_tier import FastTier
from triax.train.optimizer import Optimizer
from triax.train.reporter import Reporter
from triax.train.state import TrainState, extra_of, tensors_of
from triax.units import format_seconds


class Saver:
    """Saves states of one run. A save that fails is told, and training goes on."""

    def __init__(
        self, writer: CheckpointWriter, stages: Sequence[Decoder], optimizer: Optimizer, plan: Plan,
        data_fingerprint: str, began_as: str | None, reporter: Reporter, cadence: Cadence,
        tier: FastTier, uploader: Uploader | None,
    ) -> None:  # fmt: skip
        """``began_as``: digest of the checkpoint that gave the run its first weights, None where they were random."""
        self._writer, self._plan, self._reporter, self._cadence = writer, plan, reporter, cadence
        self._stages, self._optimizer = stages, optimizer
        optimizer.before_update = self._wait_until_copied
        self._data_fingerprint, self._began_as = data_fingerprint, began_as
        self._tier, self._uploader = tier, uploader
        self._stall_s = 0.0
        self._has_given_up = False
        self.newest_step = 0
        """The newest step that this session has brought to disk; 0 where none."""
        self.failure = ""
        """Why the newest save failed; empty where it did not."""
        self.last_step: int | None = None
        """The step after which training ends, once that is known: who ends the run tells why it was not saved."""

    def is_due(self, step: int) -> bool:
        """Return whether the state after ``step`` steps is to be saved; called once after each step."""
        return self._cadence.is_due(step)

    def is_copy_due(self, step: int) -> bool:
        """Return whether the state after ``step`` steps is to be copied to memory; called once after each step."""
        return self._tier.is_due(step)

    def copy(self, state: TrainState) -> None:
        """Begin to copy ``state`` to the memory of the servers."""
        started_s = time.perf_counter()
        extra = extra_of(state, self._plan, self._data_fingerprint, self._began_as)
        self._tier.save(state.step, tensors_of(self._stages, self._optimizer), extra)
        self._count(time.perf_counter() - started_s)

    def end(self) -> None:
        """Let go of the copies in memory, and wait for the last upload: the last state is on disk."""
        self._tier.end()
        if self._uploader is not None:
            if not self._uploader.finish(self._plan.run.train.timeout_s):
                self._reporter.warn("the last checkpoint is still being copied to the store, and the run ends.")
            self._tell_of_upload()

    def save(self, state: TrainState, *, wait: bool) -> None:
        """Begin to save ``state``; with ``wait``, return when it is on disk or has failed."""
        started_s = time.perf_counter()
        extra = extra_of(state, self._plan, self._data_fingerprint, self._began_as)
        handle = self._writer.save(state.step, tensors_of(self._stages, self._optimizer), extra, beside=True)
        self._tell(handle.previous)
        self._tell(handle.outcome)
        if wait and handle.outcome is None:
            self.finish()
        self._count(time.perf_counter() - started_s)

    def poll(self) -> None:
        """Tell how the save in flight ended, if it did; does not wait."""
        self._tell(self._writer.poll())
        self._tier.poll()
        self._tell_of_upload()

    def finish(self) -> None:
        """Wait for the save in flight, as long as ranks wait for each other: a hanging disk must not hang the run."""
        patience_s = self._plan.run.train.timeout_s
        outcome = self._writer.finish(0.0 if self._has_given_up else patience_s)
        self._tell(outcome)
        if outcome is None and (step := self._writer.step_in_flight) is not None:
            self._has_given_up = True
            self.failure = f"step {step} is still being written after {format_seconds(patience_s)}"

    def take_stall_s(self) -> float:
        """Return for how many seconds saving has kept training waiting since the last call."""
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    def _tell_of_upload(self) -> None:
        for problem in self._uploader.take_told() if self._uploader is not None else ():
            self._reporter.event("upload_failed", self.newest_step, {"reason": problem})
            self._reporter.warn(f"{problem}; training goes on.")

    def _wait_until_copied(self) -> None:
        started_s = time.perf_counter()
        self._writer.wait_until_copied()
        self._tier.wait_until_copied()
        self._count(time.perf_counter() - started_s)

    def _count(self, stall_s: float) -> None:
        self._cadence.leave_out(stall_s)
        self._tier.leave_out(stall_s)
        self._stall_s += stall_s

    def _tell(self, outcome: SaveOutcome | None) -> None:
        if outcome is None:
            return
        self.failure = "" if outcome.ok else outcome.reason
        if (interval := self._cadence.learn(outcome)) is not None:
            self._reporter.event("checkpoint_interval", outcome.step, asdict(interval))
            self._reporter.say(f"checkpoints: {interval.describe()}")
        if outcome.ok:
            self.newest_step = outcome.step
            if self._uploader is not None:
                self._uploader.offer(outcome.step)
            detail = {"seconds": outcome.seconds, "stall_seconds": outcome.stall_seconds, "bytes": outcome.bytes}
            self._reporter.event("save", outcome.step, detail)
            if outcome.reason:
                self._reporter.warn(f"step {outcome.step} is saved, but {outcome.reason}.")
        else:
            self._reporter.event("save_failed", outcome.step, {"reason": outcome.reason})
            if outcome.step != self.last_step:
                self._reporter.warn(f"step {outcome.step} was not saved: {outcome.reason}; training goes on.")
