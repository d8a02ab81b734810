"""What stands in the folder of a run, and may this run go on in it? Torch-free: asked before any rank starts."""

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tomli_w

from triax.checkpoint.disk import make_folders, remove_empty
from triax.errors import BadInput, Superseded
from triax.spec.generations import AGENTS, newest_number
from triax.spec.model_source import as_run_file
from triax.spec.plan import Plan, plan_as_json
from triax.spec.run import FORMAT_VERSION, Run
from triax.train.origin import carry_along

_LOCK: Final = ".lock"
_LOCK_OF_RANK_0: Final = ".rank-0.lock"

_LOCK_LOOK_S: Final = 0.05

_STEP_FOLDER: Final = re.compile(r"step-([0-9]{8,19})(?:-[0-9]+)?")

_LARGEST_GLANCE_BYTES: Final = 1 << 24
"""A manifest above this takes longer to read than a mistake in a run file should take to be told."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside a run's folder."""

    path: Path
    generation: int | None = None
    """Of the ranks that write here, where agents of several servers decide which ranks may; None: one command alone
    holds the folder."""

    @property
    def agents(self) -> Path:
        """Where agents of several servers speak to each other."""
        return self.path / AGENTS

    def refuse_superseded(self) -> None:
        """Raise Superseded where ranks of a newer generation may write here: asked before each thing that is written.

        A folder that cannot be read is no permission.
        """
        if self.generation is None:
            return
        try:
            newest = newest_number(self.agents, "generation")
        except OSError as error:
            raise Superseded(
                f"{self.agents} cannot be read ({error.strerror or error}), so these ranks may not go on."
            ) from None
        if newest > self.generation:
            raise Superseded("other servers have gone on with the run: these ranks stop and write nothing.")

    @property
    def plan(self) -> Path:
        """The plan that the newest start of the run followed."""
        return self.path / "plan.json"

    @property
    def cluster(self) -> Path:
        """The machine of the newest start, with what was measured of it."""
        return self.path / "cluster.toml"

    @property
    def checkpoints(self) -> Path:
        """Folder of saved states."""
        return self.path / "checkpoints"

    @property
    def stopped(self) -> Path:
        """Marker that the run was asked to stop and saved its state."""
        return self.path / "stopped.json"

    @property
    def stop_file(self) -> Path:
        """Whoever makes it asks the run to save its state and stop; the next start removes it."""
        return self.path / "stop"

    def newest_step(self) -> int | None:
        """Return the step of the newest saved state, by its name alone; None where there is none."""
        found = (_STEP_FOLDER.fullmatch(path.parent.name) for path in self.checkpoints.glob("step-*/manifest.json"))
        return max((int(match[1]) for match in found if match), default=None)

    def timeline(self, step: int) -> Path:
        """When each rank ran each action of ``step``."""
        return self.path / f"timeline-step{step:08d}.json"

    def timed_steps(self) -> list[int]:
        """Return the steps that were timed, ascending."""
        found = (re.fullmatch(r"timeline-step([0-9]{8,19})\.json", path.name) for path in self.path.iterdir())
        return sorted(int(match[1]) for match in found if match)

    @property
    def places(self) -> Path:
        """Where the local ranks of the newest start stand (``triax.train.places``)."""
        return self.path / ".places"

    @property
    def stacks(self) -> Path:
        """Where ranks stood in their code that stood still."""
        return self.path / "stacks"

    def is_of_a_run(self) -> bool:
        """Return True where a run was started in the folder before."""
        return self._resolved.exists()

    @contextmanager
    def locked(self, patience_s: float = 0.0) -> Iterator[None]:
        """Hold the folder against a second start of the same run; raise BadInput where one is under way.

        Ranks whose start was killed save and leave by themselves, and until then the folder is theirs: they are waited
        for, at most ``patience_s``. A wish to stop that was for an earlier start is forgotten.

        Where no run has begun in the folder by the end, as one that was refused, nothing is left of the attempt.
        """
        made = self._make()
        try:
            with self._held(_LOCK):
                with self._held(_LOCK_OF_RANK_0, patience_s):
                    self.stop_file.unlink(missing_ok=True)
                try:
                    yield
                finally:
                    if not self.is_of_a_run():
                        with suppress(BadInput), self.held_by_rank_0():
                            self._remove_traces()
        finally:
            remove_empty(made)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the folder together with agents of other servers; raise BadInput where one command alone holds it.

        The first one forgets a wish to stop that was for an earlier start.
        """
        self._make()
        with suppress(BadInput), self._held(_LOCK):
            self.stop_file.unlink(missing_ok=True)
        with self._held(_LOCK, how=fcntl.LOCK_SH):
            yield

    def _remove_traces(self) -> None:
        remove_empty([self.checkpoints])
        for path in (self.places, self.path / _LOCK_OF_RANK_0, self.path / _LOCK):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    @contextmanager
    def held_by_rank_0(self) -> Iterator[None]:
        """Hold the folder as the rank that writes to it; raise BadInput where another one does."""
        with self._held(_LOCK_OF_RANK_0):
            yield

    @contextmanager
    def _held(self, name: str, patience_s: float = 0.0, how: int = fcntl.LOCK_EX) -> Iterator[None]:
        lock = self._taken(name, patience_s, how)
        try:
            yield
        finally:
            os.close(lock)

    def _taken(self, name: str, patience_s: float, how: int) -> int:
        """Return the descriptor of a file that this process has locked; raise BadInput where another one has it for
        longer than ``patience_s``."""
        path, gives_up_s = self.path / name, time.monotonic() + patience_s
        while True:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise self._unwritable(error) from None
            try:
                fcntl.flock(lock, how | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                if time.monotonic() < gives_up_s:
                    time.sleep(_LOCK_LOOK_S)
                    continue
                raise BadInput(
                    f"{self.path} belongs to a run that is still going: wait for it, or give another --run-dir."
                ) from None
            except OSError:
                # A file system without locks (some network mounts): better to train unguarded than not at all.
                return lock
            # A start that was refused may have removed the file after it was opened here.
            if _is_at(path, lock):
                return lock
            os.close(lock)

    def _make(self) -> list[Path]:
        try:
            return make_folders(self.path)
        except OSError as error:
            raise self._unwritable(error) from None

    def refuse_another_run(self, plan: Plan) -> None:
        """Raise BadInput, with the keys that differ, where the folder holds states of another run than ``plan``'s.

        The newest manifest that can be read decides. It is not verified here, and a very large one is not read: ranks
        do both before they go on from a state.
        """
        for path in sorted(self.checkpoints.glob("step-*/manifest.json"), reverse=True):
            extra = _said_by(path)
            if extra is None:
                continue
            if extra.get("fingerprint") != plan.fingerprint:
                raise BadInput(another_run(f"{self.path} holds checkpoints", extra.get("mathematics"), plan.run))
            return

    def write_plan(self, plan: Plan, run_text: str) -> None:
        """Write what says how the run is done. ``run_text`` is the run file as the user wrote it, empty where there is
        none. Raises BadInput where the folder cannot be written."""
        try:
            if run_text:
                write_atomically(self.path / "run.toml", run_text)
            write_atomically(self._resolved, _resolved_toml(plan))
            write_atomically(self.cluster, _toml(plan.cluster.model_dump(mode="json")))
            write_atomically(self.plan, json.dumps(plan_as_json(plan), indent=1) + "\n")
            carry_along(plan.run, self.path)
            self.stopped.unlink(missing_ok=True)
        except OSError as error:
            raise self._unwritable(error) from None

    @property
    def _resolved(self) -> Path:
        return self.path / "resolved.toml"

    def _unwritable(self, error: OSError) -> BadInput:
        reason = error.strerror or str(error)
        return BadInput(f"the run folder {self.path} cannot be written: {reason}; give another --run-dir.")


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether ``path`` is the name of the file that is open as ``descriptor``."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _said_by(manifest: Path) -> dict[str, Any] | None:
    """Return what a run wrote into a manifest beside the tensors; None where that cannot be read."""
    try:
        if not manifest.is_file() or manifest.stat().st_size > _LARGEST_GLANCE_BYTES:
            return None
        said = json.loads(manifest.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    extra = said.get("extra") if isinstance(said, dict) else None
    return extra if isinstance(extra, dict) else None


def another_run(subject: str, before: Any, run: Run) -> str:
    """Return why ``subject``, of a run with the mathematics ``before``, is not of ``run``: the keys that differ."""
    return (
        f"{subject} of another run ({what_differs(before, run)}): put the old values back to go on, or give another "
        f"--run-dir to start anew."
    )


def what_differs(before: Any, run: Run) -> str:
    """Return the keys in which the mathematics ``before`` differs from that of ``run``, and both values of each."""
    differing = _differences(before, run.mathematics()) if isinstance(before, dict) else []
    return "; ".join(differing) or f"the fingerprint of this one is {run.fingerprint}"


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that a reader finds the old file or the new one, never a part."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _resolved_toml(plan: Plan) -> str:
    header = f"# Every value of this run, defaults included. fingerprint = {plan.fingerprint}\n"
    said = as_run_file(plan.run.model_dump(mode="json")) | {"layout": plan.layout.model_dump(mode="json")}
    said["cluster"] = plan.cluster.model_dump(mode="json")
    return header + _toml(said)


def _toml(said: dict[str, Any]) -> str:
    return tomli_w.dumps({"format_version": FORMAT_VERSION, **without_none(said)})


def without_none(value: Any) -> Any:
    """Return plain values for TOML, which has no null: an absent key says the same."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def _differences(before: Any, after: Any, prefix: str = "") -> list[str]:
    """Return ``key: before -> after`` for each value that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in sorted(before.keys() | after.keys())
            for line in _differences(before.get(key), after.get(key), f"{prefix}.{key}" if prefix else key)
        ]
    return [] if before == after else [f"{prefix} was {before} and is now {after}"]
