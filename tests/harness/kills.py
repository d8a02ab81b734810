"""How does a test kill what belongs to a run, again and again, at any moment, and see that nothing was lost by it?"""

import json
import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from tests.cli.typed import environment, started, workers_of
from triax.train.run_folder import RunFolder
from triax.watch.record import read_events

Victim = Literal["rank", "two ranks", "fork server", "command", "command and rank"]
Moment = Literal["step", "save", "start"]

_VICTIMS: Final[dict[Victim, int]] = {
    "rank": 12, "two ranks": 2, "fork server": 1, "command": 4, "command and rank": 1,
}  # fmt: skip
_MOMENTS: Final[dict[Moment, int]] = {"step": 6, "save": 2, "start": 2}
_LOOK_S: Final = 0.002
_PATIENCE_S: Final = 120.0
_STEPS_A_KILL: Final = 6
_LONGEST_START_S: Final = 0.5


@dataclass(frozen=True)
class Kill:
    """What was killed, when, and how far the run was."""

    victim: Victim
    moment: Moment
    step: int
    """The newest step that was written down."""
    saved: int
    """The newest checkpoint just before."""
    at_s: float
    """When, in seconds since 1970."""


@dataclass
class Soak:
    """One run that is killed ``num_kills`` times, and started again as a scheduler would where its command was."""

    command: Sequence[str]
    cwd: Path
    run_dir: Path
    num_kills: int
    seed: int
    kills: list[Kill] = field(default_factory=list)
    mark: str = field(default_factory=lambda: f"triax-soak-{uuid.uuid4().hex}")

    @staticmethod
    def steps(num_kills: int) -> int:
        """Return how many steps a run must have, so that it does not end before its last kill."""
        return _STEPS_A_KILL * (num_kills + 1)

    def run(self) -> None:
        """Start the run, kill it as often as was said, and see it end well."""
        dice = random.Random(self.seed)
        process = self._start()
        for number in range(self.num_kills):
            (victim,) = dice.choices(list(_VICTIMS), list(_VICTIMS.values()))
            (moment,) = dice.choices(list(_MOMENTS), list(_MOMENTS.values()))
            self._wait_for(moment, _STEPS_A_KILL * number + dice.randrange(_STEPS_A_KILL) + 1, dice, process)
            pids = self._victims(victim, dice, process)
            saved = RunFolder(self.run_dir).newest_step() or 0
            self.kills.append(Kill(victim, moment, self._step(), saved, time.time()))
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if process.pid in pids:
                process.wait(_PATIENCE_S)
                process = self._start()
            else:
                self._until_gone(pids, process)
        _, told = process.communicate(timeout=_PATIENCE_S)
        assert process.returncode == 0, told
        assert "Traceback" not in told, told

    def lost_more_than_since_the_checkpoint(self) -> list[Kill]:
        """Return the kills after which the run went on from before a checkpoint that was there."""
        begun = [event for event in read_events(self.run_dir) if event["kind"] in ("start", "resume")]
        after = {kill: [event["step"] for event in begun if event["time"] > kill.at_s] for kill in self.kills}
        return [kill for kill, steps in after.items() if steps and steps[0] < kill.saved]

    def left_over(self) -> list[str]:
        """Return what still runs of all that was started, after ten seconds at most."""
        deadline_s = time.monotonic() + 10
        while (found := list(self._marked())) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return found

    def _marked(self) -> Iterator[str]:
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_alive = (path / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                if is_alive and self.mark.encode() in (path / "environ").read_bytes():
                    yield (path / "cmdline").read_text().replace("\0", " ")

    def _start(self) -> "subprocess.Popen[str]":
        process = started(list(self.command), self.cwd, environment(TRIAX_SOAK=self.mark))
        self._until(lambda: bool(workers_of(process)), process)
        return process

    def _wait_for(self, moment: Moment, step: int, dice: random.Random, process: "subprocess.Popen[str]") -> None:
        if moment == "start":  # of the attempt that follows on the last kill
            self._until(lambda: bool(workers_of(process)), process)
            time.sleep(dice.uniform(0, _LONGEST_START_S))
            return
        self._until(lambda: self._step() >= step, process)
        if moment == "save":
            self._until(self._is_saving, process)
        time.sleep(dice.uniform(0, 0.02))

    def _victims(self, victim: Victim, dice: random.Random, process: "subprocess.Popen[str]") -> list[int]:
        self._until(lambda: bool(workers_of(process)), process)
        ranks = workers_of(process)
        some = dice.sample(ranks, min(len(ranks), 2 if victim == "two ranks" else 1))
        if victim == "fork server":
            return [_parent(some[0])]
        return {"command": [process.pid], "command and rank": [process.pid, *some]}.get(victim, some)

    def _until_gone(self, pids: Sequence[int], process: "subprocess.Popen[str]") -> None:
        self._until(lambda: not set(pids) & set(workers_of(process)), process)

    def _is_saving(self) -> bool:
        folders = (self.run_dir / "checkpoints").glob("step-*")
        return any(not (folder / "manifest.json").exists() for folder in folders)

    def _step(self) -> int:
        """Return the step of the last whole line of metrics."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        for line in reversed(lines):
            if line.strip():
                return int(json.loads(line)["step"])
        return 0

    def _until(self, is_so: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not is_so():
            if process.poll() is not None:
                raise AssertionError(f"the run ended by itself after {self.kills}: {process.communicate()[1]}")
            assert time.monotonic() < deadline_s, f"waited in vain after {self.kills}"
            time.sleep(_LOOK_S)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
