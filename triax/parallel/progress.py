"""What is this rank doing, and when did it do it? Always known, for the sentence of a failed run; timed where asked.

What a rank is doing is written into a few bytes that may lie in memory shared with the process that started the rank,
so that it is also known of a rank that was killed. It costs an action a few microseconds.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from triax.parallel.slot import Slot
from triax.parallel.waits import BusyClock, Kind
from triax.spec.schedule import Action

_WORDS: Final = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
_KINDS: Final[dict[str, Kind]] = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


@dataclass(frozen=True, slots=True)
class ActionTimes:
    """When this rank ran each action of one step, in the order of its row; seconds of this server's monotonic clock."""

    origin_s: float
    """When every rank had come to the step, the same moment on all servers up to the time of a barrier."""
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]


class Progress:
    """The phase of this rank, and the times of its actions in a step for which they were asked."""

    def __init__(self, slot: Slot | None = None, device: torch.device | None = None) -> None:
        """``slot``: where others read what this rank does. On a CUDA ``device``, times are those of the card."""
        self._slot = slot or Slot()
        self.clock = BusyClock(self._slot)
        """How long this rank is busy."""
        self._is_cuda = device is not None and device.type == "cuda"
        self._section = ""
        self._row: Sequence[Action] = ()
        self._next = 0
        self._stopwatch: _Stopwatch | None = None

    @property
    def phase(self) -> str:
        """What this rank is doing, such as ``step 3, forward of stage 1, microbatch 0``."""
        return self._slot.phase

    def enter_step(self, step: int) -> None:
        """Say that ``step`` begins, from 1: the phases from here on are its own."""
        self._enter(f"step {step}", step)

    def enter(self, section: str) -> None:
        """Say that something else begins, which may take longer than a step: the phases from here on are its own."""
        self._enter(section, None)

    def _enter(self, section: str, step: int | None) -> None:
        self._slot.enter(step)
        self._section = ""
        self.enter_phase(section)
        self._section = f"{section}, "

    def enter_phase(self, phase: str) -> None:
        """Say that ``phase`` of the section begins."""
        self._slot.change(self._section + phase)

    def follow(self, row: Sequence[Action]) -> None:
        """Say that the actions of ``row`` come now, in this order."""
        self._row, self._next = row, 0
        self.wait()

    def begin(self, action: Action) -> None:
        """Say that ``action`` has its inputs and begins."""
        expected = self._row[self._next]
        assert action == expected, f"{action} runs where the schedule says {expected}"
        self.enter_phase(_phrase(action))
        self.clock.turn(_KINDS[action.kind])
        if self._stopwatch is not None:
            self._stopwatch.starts.append(self._stopwatch.mark())

    def end(self) -> None:
        """Say that the action that began has ended."""
        if self._stopwatch is not None:
            self._stopwatch.ends.append(self._stopwatch.mark())
        self._next += 1
        self.clock.turn("rest")
        self.wait()

    def wait(self) -> None:
        """Say that the next action waits for its inputs."""
        is_over = self._next == len(self._row)
        self.enter_phase("end of the schedule" if is_over else f"waiting to start the {_phrase(self._row[self._next])}")

    def time_actions(self) -> None:
        """Time the actions from here on; all ranks call this together, before the first action of a step."""
        dist.barrier()
        self._stopwatch = _Stopwatch(self._is_cuda)

    def take_times(self) -> ActionTimes:
        """Return the times since ``time_actions`` and time no more."""
        assert self._stopwatch is not None
        times, self._stopwatch = self._stopwatch.read(), None
        return times


def _phrase(action: Action) -> str:
    return f"{_WORDS[action.kind]} of stage {action.stage}, microbatch {action.microbatch}"


class _Stopwatch:
    """Marks on the host's clock, or on that of the card, which works behind the host's back."""

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        if is_cuda:
            torch.cuda.synchronize()
        self.starts: list[float | torch.cuda.Event] = []
        self.ends: list[float | torch.cuda.Event] = []
        self._origin = self.mark()
        self._origin_s = time.perf_counter()

    def mark(self) -> "float | torch.cuda.Event":
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> ActionTimes:
        if self._is_cuda:
            torch.cuda.synchronize()
        return ActionTimes(self._origin_s, tuple(map(self._seconds, self.starts)), tuple(map(self._seconds, self.ends)))

    def _seconds(self, mark: "float | torch.cuda.Event") -> float:
        if isinstance(mark, float):
            return mark
        assert isinstance(self._origin, torch.cuda.Event)
        since_origin_ms: float = self._origin.elapsed_time(mark)
        return self._origin_s + since_origin_ms / 1e3
