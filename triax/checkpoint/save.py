"""How does training save its state while it goes on, and never fail or lose a checkpoint by it?"""

import json
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from triax.checkpoint.agree import Ranks
from triax.checkpoint.commit import NeverAppeared, Ticket, collect, commit, deliver, tidy
from triax.checkpoint.copying import Copying
from triax.checkpoint.disk import Cancelled, free_bytes, make_folders, sentence
from triax.checkpoint.division import Division
from triax.checkpoint.format import folder_name
from triax.checkpoint.history import begin_history
from triax.checkpoint.patience import Asker
from triax.checkpoint.retain import begin_folder, remove, remove_after, remove_unfinished
from triax.errors import BadInput, Superseded, TriaxError
from triax.units import format_bytes, format_seconds


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended; the same on every rank."""

    step: int
    ok: bool
    """Whether a complete checkpoint of the step is on the disk."""
    seconds: float
    """From the call of ``save`` until the last byte was on the disk, on the slowest rank."""
    stall_seconds: float
    """For how long ``save`` kept training waiting, on the slowest rank."""
    bytes: int
    reason: str
    """Why it failed, or what went wrong beside a checkpoint that is whole; empty if nothing did."""


@dataclass(frozen=True)
class SaveHandle:
    """What is known when ``save`` returns. ``poll`` or ``finish`` tell the rest."""

    step: int
    stall_seconds: float
    outcome: SaveOutcome | None
    """Already known if the save was waited for, or could not begin."""
    previous: SaveOutcome | None
    """Of the save before this one, if it was still being written when this one was asked for."""


@dataclass
class _Saving:
    """The save in flight, shared by the caller's thread and the one that writes."""

    ticket: Ticket
    extra: dict[str, Any]
    began_s: float
    copying: Copying
    stall_s: float = 0.0
    ended_s: float = 0.0
    thread: threading.Thread | None = None
    cancel: threading.Event = field(default_factory=threading.Event)
    is_delivered: bool = False
    is_late: bool = False
    """Whether a save after it has waited for it in vain."""
    overdue_at_s: float | None = None
    num_bytes: int = 0
    failure: str = ""
    problems: list[str] = field(default_factory=list)


class CheckpointWriter:
    """Saves the state of one run to one folder. All ranks of the group call every method together, in the same order.

    ``folder`` is ``RUN/checkpoints``, on a disk that all servers share; it is made if need be. ``keep`` newest
    checkpoints stay. ``run`` names the run: only checkpoints of the same name are ever deleted. ``group`` must carry
    CPU tensors or be made for NCCL alone; None is the default group. ``patience_s`` limits how long a save waits for
    the one before it, and how long files of other servers may take to appear. ``permit`` raises Superseded where other
    ranks have gone on with the run: rank 0 asks before it makes a folder, and right before a checkpoint becomes one.

    Raises BadInput, on every rank, if the folder cannot be written to.
    """

    def __init__(
        self, folder: Path, group: ProcessGroup | None = None, keep: int = 3, *, run: str, patience_s: float = 120.0,
        permit: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        if keep < 1:
            raise BadInput(f"keep={keep} checkpoints would leave nothing to resume from: keep at least 1.")
        self._folder, self._keep, self._run, self._patience_s = folder, keep, run, patience_s
        self._permit = permit
        self._ranks = Ranks.of(group)
        self._division = Division(self._ranks)
        self._saving: _Saving | None = None
        self._disk = Asker()
        self.history = ""
        """Name of the history that states in memory belong to; empty where ``begin_history`` was not called."""
        problems = []
        if self._ranks.rank == 0:
            try:
                make_folders(folder)
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                problems.append(f"checkpoints cannot be written to {folder}: {sentence(error)}; name another folder.")
        if problems := self._ranks.union(problems):
            raise BadInput(problems[0])

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        extra: Mapping[str, Any],
        wait: bool = False,
        *,
        beside: bool = False,
    ) -> SaveHandle:
        """Begin to save ``tensors`` and rank 0's ``extra`` (JSON values) as the checkpoint of ``step``.

        Returns once the state is copied to host memory; a thread writes it. With ``beside`` the thread copies it, too:
        the tensors must not change before ``wait_until_copied`` has returned. If the save before this one is still
        being written, waits for it, and skips this one after ``patience_s``; the one after that skips at once. With
        ``wait`` the outcome is on the handle.

        A disk that is full, slow or broken is an outcome, never an exception. Raises BadInput, on every rank, only for
        tensors that no disk could take: a placement local_slices refuses, or ranks that do not hold a tensor once and
        whole.
        """
        began_s = time.monotonic()
        is_late = self._saving is not None and self._saving.is_late
        previous = self.finish(0.0 if is_late else self._patience_s)
        if self._saving is not None:
            self._saving.is_late = True
            behind = self._saving.ticket.step
            reason = f"skipped, because step {behind} is still being written after {format_seconds(self._patience_s)}"
            return self._not_begun(step, began_s, reason, None)
        slices = self._division.agree(step, tensors)
        begun = self._ranks.broadcast(self._begin_in_time(step, extra) if self._ranks.rank == 0 else None)
        if "reason" in begun:
            return self._not_begun(step, began_s, begun["reason"], previous)
        ticket = Ticket(step, self._folder / begun["folder"], begun["token"])
        copying = Copying(self._division.part, slices)
        self._saving = saving = _Saving(ticket, begun["extra"], began_s, copying)
        saving.thread = threading.Thread(target=self._copy_and_write, args=(saving,), name=f"save-{step}", daemon=True)
        saving.thread.start()
        if not beside:
            copying.wait()
        saving.stall_s = time.monotonic() - began_s
        return SaveHandle(step, saving.stall_s, self.finish() if wait else None, previous)

    def poll(self) -> SaveOutcome | None:
        """Return how the save in flight ended, once; None while it goes on, or where there is none. Does not wait."""
        saving = self._saving
        if saving is None:
            return None
        is_running = saving.thread is not None and saving.thread.is_alive()
        has_failed, is_undelivered, goes_on = self._ranks.maxima(
            bool(saving.failure), is_running and not saving.is_delivered, is_running
        )
        if has_failed:
            saving.cancel.set()
        elif not is_undelivered and saving.overdue_at_s is None:
            saving.overdue_at_s = time.monotonic() + self._patience_s
        return None if goes_on else self._conclude(saving)

    def finish(self, patience_s: float | None = None) -> SaveOutcome | None:
        """Wait for the save in flight and return how it ended; None where there is none, or after ``patience_s``."""
        gives_up_at_s = None if patience_s is None else time.monotonic() + patience_s
        wait_s = 0.002
        while self._saving is not None:
            thread = self._saving.thread
            if outcome := self.poll():
                return outcome
            if gives_up_at_s is not None and any(self._ranks.maxima(time.monotonic() > gives_up_at_s)):
                return None
            if thread is not None:
                thread.join(wait_s)
            wait_s = min(2 * wait_s, 0.1)
        return None

    def wait_until_copied(self) -> None:
        """Return when the state that is being saved may be changed. A rank may call this alone."""
        if self._saving is not None:
            began_s = time.monotonic()
            self._saving.copying.wait()
            self._saving.stall_s += time.monotonic() - began_s

    @property
    def step_in_flight(self) -> int | None:
        """The step of the save whose outcome is not known yet; None where there is none."""
        return None if self._saving is None else self._saving.ticket.step

    def begin_history(self, step: int) -> str:
        """Begin the history of a run that goes on from ``step``, and return why that could not be, empty if it was.

        Its name is ``history`` from now on, empty where it could not be.
        """
        said = {"name": "", "reason": ""}
        if self._ranks.rank == 0:
            try:
                said["name"] = self._disk.ask(lambda: begin_history(self._folder, step), self._patience_s).name
            except OSError as error:
                said["reason"] = f"the history of the run could not be written: {sentence(error)}"
        said = self._ranks.broadcast(said)
        self.history = said["name"]
        return str(said["reason"])

    def discard_after(self, step: int) -> str:
        """Remove this run's checkpoints later than ``step``, because training has gone back to it; see remove_after.

        No save may be in flight. Returns why it could not be done, empty if it was.
        """
        assert self._saving is None, "finish() the save in flight first"
        reason = self.begin_history(step) if self.history else ""
        if self._ranks.rank == 0 and not reason:
            try:
                self._permit()
                self._disk.ask(lambda: remove_after(self._folder, self._run, step), self._patience_s)
            except OSError as error:
                reason = f"checkpoints after step {step} could not be removed: {sentence(error)}"
            except (BadInput, Superseded) as error:
                reason = str(error)
        return str(self._ranks.broadcast(reason))

    def _begin_in_time(self, step: int, extra: Mapping[str, Any]) -> dict[str, Any]:
        """On rank 0: ``_begin``, or the reason that the disk does not answer. Training waits for this."""
        try:
            return self._disk.ask(lambda: self._begin(step, extra), self._patience_s)
        except TimeoutError as error:
            return {"reason": f"{self._folder / folder_name(step)} cannot be made: {sentence(error)}"}

    def _begin(self, step: int, extra: Mapping[str, Any]) -> dict[str, Any]:
        """On rank 0: make room and a folder for the checkpoint. Return it, or the reason why it cannot be."""
        needed = self._division.total_bytes
        try:
            self._permit()
            plain = json.loads(json.dumps(dict(extra), allow_nan=False))
            remove_unfinished(self._folder, self._run)
            free = free_bytes(self._folder)
            if needed > free:
                full = f"disk full: it needs {format_bytes(needed)} in {self._folder} and {format_bytes(free)} are free"
                return {"reason": full}
            made = begin_folder(self._folder, step, self._run)
        except (TypeError, ValueError, RecursionError) as error:
            return {"reason": f"`extra` is not made of JSON values: {error}"}
        except TriaxError as error:
            return {"reason": str(error)}
        except OSError as error:
            return {"reason": f"{self._folder / folder_name(step)} cannot be made: {sentence(error)}"}
        return {"folder": made.name, "token": secrets.token_hex(8), "extra": plain}

    def _not_begun(self, step: int, began_s: float, reason: str, previous: SaveOutcome | None) -> SaveHandle:
        (stall_us,) = self._ranks.maxima(int(1e6 * (time.monotonic() - began_s)))
        stall_s = stall_us / 1e6
        return SaveHandle(step, stall_s, SaveOutcome(step, False, stall_s, stall_s, 0, reason), previous)

    def _copy_and_write(self, saving: _Saving) -> None:
        try:
            saving.copying.run()
        except (MemoryError, RuntimeError) as error:  # torch says RuntimeError when host memory or the card fails
            saving.failure = f"rank {self._ranks.rank} could not copy its state to host memory: {error}"
            saving.ended_s = time.monotonic()
        else:
            self._write(saving)

    def _write(self, saving: _Saving) -> None:
        """On the writing thread: bring this rank's part to the disk, and on rank 0 the checkpoint to its commit."""
        ticket, rank = saving.ticket, self._ranks.rank
        try:
            file = self._division.part.write(ticket.folder, saving.cancel.is_set)
            if file is not None:
                deliver(ticket, rank, file)
            saving.is_delivered = True
            if rank == 0:
                files = collect(
                    ticket, self._division.writers, saving.cancel.is_set,
                    lambda: saving.overdue_at_s is not None and time.monotonic() > saving.overdue_at_s,
                )  # fmt: skip
                commit(ticket, self._run, saving.extra, self._division.entries, files, self._permit)
                saving.num_bytes = sum(file.bytes for file in files)
                saving.problems = tidy(ticket, self._run, self._keep, self._division.writers)
        except Cancelled:
            pass  # another rank has failed, and says why
        except (NeverAppeared, Superseded) as error:
            saving.failure = str(error)
        except OSError as error:
            what = Path(error.filename).name if error.filename else self._division.part.file_name
            saving.failure = f"rank {rank} could not write {what}: {sentence(error)}"
        except Exception as error:  # a fault in here must end as a warning in the log, not as a thread that vanished
            saving.failure = f"rank {rank} could not write its part: {type(error).__name__}: {error}"
        finally:
            saving.ended_s = time.monotonic()

    def _conclude(self, saving: _Saving) -> SaveOutcome:
        """Agree on how a save ended that no rank works on any more; remove what a failed one has left."""
        mine = (saving.failure, saving.ended_s - saving.began_s, saving.stall_s)
        said = self._ranks.gather(mine)
        outcome: SaveOutcome | None = None
        if said is not None:
            failures = [failure for failure, _, _ in said if failure]
            problems = failures[:3] + saving.problems
            if failures:
                try:
                    self._disk.ask(lambda: remove(saving.ticket.folder), self._patience_s)
                except OSError as error:
                    problems.append(f"what was written of it could not be removed either: {sentence(error)}")
            outcome = SaveOutcome(
                step=saving.ticket.step,
                ok=not failures,
                seconds=max(seconds for _, seconds, _ in said),
                stall_seconds=max(stall for _, _, stall in said),
                bytes=0 if failures else saving.num_bytes,
                reason="; ".join(problems),
            )
        told = self._ranks.broadcast(None if outcome is None else asdict(outcome))
        self._saving = None
        return SaveOutcome(**told)
