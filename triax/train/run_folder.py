"""What stands in the folder of a run, and may this run go on in it? Torch-free: asked before any rank starts."""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from triax.errors import BadInput
from triax.spec.load import load_plan
from triax.spec.plan import Plan, plan_as_json


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside a run's folder."""

    path: Path

    @property
    def plan(self) -> Path:
        """The plan that the newest start of the run followed."""
        return self.path / "plan.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of saved states."""
        return self.path / "checkpoints"

    @property
    def stopped(self) -> Path:
        """Marker that the run was asked to stop and saved its state."""
        return self.path / "stopped.json"

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

    def has_checkpoints(self) -> bool:
        """Return True where at least one saved state is complete enough to try."""
        return any(self.checkpoints.glob("step-*/manifest.json"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder against a second start of the same run; raise BadInput where one is under way."""
        lock = self._open_lock()
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadInput(
                    f"{self.path} belongs to a run that is still going: wait for it, or give another --run-dir."
                ) from None
            except OSError:
                # A file system without locks (some network mounts): better to train unguarded than not at all.
                pass
            yield
        finally:
            os.close(lock)

    def _open_lock(self) -> int:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise BadInput(
                f"the run folder {self.path} cannot be written: {error.strerror}; give another --run-dir."
            ) from None

    def prepare(self, plan: Plan, run_text: str) -> None:
        """Write what says how the run is done; refuse where the folder holds states of another run.

        ``run_text`` is the run file as the user wrote it. Nothing is touched before the refusal.
        """
        if self.has_checkpoints():
            self._refuse_another_run(plan)
        try:
            if run_text:
                write_atomically(self.path / "run.toml", run_text)
            write_atomically(self.path / "resolved.toml", _resolved_toml(plan))
            write_atomically(
                self.path / "cluster.toml", tomli_w.dumps(without_none(plan.cluster.model_dump(mode="json")))
            )
            write_atomically(self.plan, json.dumps(plan_as_json(plan), indent=1) + "\n")
            self.stopped.unlink(missing_ok=True)
        except OSError as error:
            raise BadInput(
                f"the run folder {self.path} cannot be written: {error.strerror}; give another --run-dir."
            ) from None

    def _refuse_another_run(self, plan: Plan) -> None:
        if not self.plan.exists():
            return
        before = load_plan(self.plan)
        if before.fingerprint == plan.fingerprint:
            return
        changed = "; ".join(_differences(before.run.mathematics(), plan.run.mathematics()))
        raise BadInput(
            f"{self.path} holds checkpoints of another run ({changed}): put the old values back to go on, or give "
            f"another --run-dir to start anew."
        )


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
    said = plan.run.model_dump(mode="json") | {"layout": plan.layout.model_dump(mode="json")}
    said["cluster"] = plan.cluster.model_dump(mode="json")
    return header + tomli_w.dumps(without_none(said))


def without_none(value: Any) -> Any:
    """Return plain values for TOML, which has no null: an absent key says the same."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return value


def _differences(before: Any, after: Any, prefix: str = "") -> list[str]:
    """Return ``key: before -> after`` for each value that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in sorted(before.keys() | after.keys())
            for line in _differences(before.get(key), after.get(key), f"{prefix}.{key}" if prefix else key)
        ]
    return [] if before == after else [f"{prefix} was {before} and is now {after}"]
