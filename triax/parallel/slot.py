"""What does a rank tell of itself while it runs, in a few bytes that another process can read? Torch-free.

The bytes may lie in memory that the rank shares with the process that started it, which so knows where a rank stands
that was killed, stopped, or never answers. Nothing is locked: each number is one aligned word, and a text that is being
changed may be read half old and half new.
"""

import time
from typing import Final

_PHASE_BYTES: Final = 192
_NUM_MARKS: Final = 8

SLOT_BYTES: Final = _PHASE_BYTES + 8 * _NUM_MARKS

_STEP, _IS_STEPPING, _CHANGED_NS, _WAITS_SINCE_NS, _PID, _STACK_FILE = range(6)


class Slot:
    """The phase of one rank, and marks of when it came there.

    Times are of the monotonic clock, which all processes of a server share, in nanoseconds. 0 stands for never or none.
    """

    def __init__(self, memory: "memoryview[int] | bytearray | None" = None) -> None:
        """``memory``: ``SLOT_BYTES`` bytes, at first zero; None: nobody else reads them."""
        whole = memoryview(bytearray(SLOT_BYTES) if memory is None else memory)
        self._phase = whole[:_PHASE_BYTES]
        self._marks = whole[_PHASE_BYTES:SLOT_BYTES].cast("q")

    @property
    def phase(self) -> str:
        """What the rank is doing, such as ``step 3, forward of stage 1, microbatch 0``; empty before its first word."""
        return bytes(self._phase).rstrip(b"\0").decode(errors="replace")

    def change(self, phase: str) -> None:
        """Say that ``phase`` begins now."""
        self._phase[:] = phase.encode()[:_PHASE_BYTES].ljust(_PHASE_BYTES, b"\0")
        self._marks[_CHANGED_NS] = time.monotonic_ns()

    @property
    def step(self) -> int:
        """The newest step that the rank has begun, from 1."""
        return self._marks[_STEP]

    @property
    def is_stepping(self) -> bool:
        """Whether the rank is inside a step, and not starting, measuring or saving, which take as long as they take."""
        return self._marks[_IS_STEPPING] == 1

    def enter(self, step: int | None) -> None:
        """Say that a step begins, or with None that something else does."""
        self._marks[_IS_STEPPING] = step is not None
        if step is not None:
            self._marks[_STEP] = step

    @property
    def changed_ns(self) -> int:
        """When the phase last changed."""
        return self._marks[_CHANGED_NS]

    @property
    def waits_since_ns(self) -> int:
        """Since when the rank's thread waits for a peer; 0: it does not, or it is not known."""
        return self._marks[_WAITS_SINCE_NS]

    def wait_since(self, moment_ns: int) -> None:
        """Say since when this rank waits for a peer; 0: no more."""
        self._marks[_WAITS_SINCE_NS] = moment_ns

    @property
    def pid(self) -> int:
        """The process of the rank."""
        return self._marks[_PID]

    @property
    def stack_file(self) -> int | None:
        """The descriptor, in the rank's process, of the file that it writes its stack into; None: it does not."""
        return self._marks[_STACK_FILE] - 1 if self._marks[_STACK_FILE] else None

    def sign(self, pid: int, stack_file: int | None) -> None:
        """Say which process the rank is, and where it leaves its stack when it is asked."""
        self._marks[_STACK_FILE] = 0 if stack_file is None else stack_file + 1
        self._marks[_PID] = pid
