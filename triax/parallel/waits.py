"""How long does this rank wait for its peers, and how long is it busy?

Every collective and every receive of gloo ends in ``Work.wait``, whoever started it: the layers here, torch's
``fully_shard``, or its pipelining runtime. So that one method is where the host waits for a peer, and all else is this
rank's own work. ``fully_shard`` would let its collectives be replaced, but not where a layer has experts, and not its
all-reduces; the way through ``Work.wait`` misses nothing and costs less than a microsecond for each.

Cores that are shared with other work come and go: for how long the system let this thread stand in line for one is not
counted, where the system tells.

On CUDA ``Work.wait`` only lets a stream wait, so a host learns nothing of its card here.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Literal

import torch.distributed as dist

from triax.parallel.slot import Slot

Kind = Literal["data", "forward", "backward", "rest"]

KINDS: Final[tuple[Kind, ...]] = ("data", "forward", "backward", "rest")
"""What a rank is busy with: reading tokens, the two directions, and all else of a step."""


class BusyClock:
    """Seconds that the thread of this rank was busy, by kind of work."""

    def __init__(self, slot: Slot) -> None:
        """``slot`` is told of every wait."""
        self._slot = slot
        self._spent_ns = dict.fromkeys(KINDS, 0)
        self._waited_ns = 0
        self._kind: Kind | None = None
        self._queue: _Queue | None = None
        self._mark = (0, 0, 0)

    def start(self, kind: Kind) -> None:
        """Begin to count, as ``kind``."""
        self._kind, self._mark, self._waited_ns = kind, self._now(), 0

    def turn(self, kind: Kind) -> None:
        """Count what follows as ``kind``, if anything is counted now."""
        if self._kind is not None:
            now = self._now()
            passed_ns, ran_ns, queued_ns = (after - before for after, before in zip(now, self._mark, strict=True))
            # A thread that wakes from a wait may stand in line too, which both then say; but it is busy while it runs.
            self._spent_ns[self._kind] += max(passed_ns - self._waited_ns - queued_ns, ran_ns)
            self._kind, self._mark, self._waited_ns = kind, now, 0

    def _now(self) -> tuple[int, int, int]:
        return time.monotonic_ns(), time.thread_time_ns(), 0 if self._queue is None else self._queue.time_ns()

    def stop(self) -> list[float]:
        """Count no more; return the seconds of each of ``KINDS`` since ``start``."""
        self.turn("rest")
        self._kind = None
        spent_s = [spent_ns / 1e9 for spent_ns in self._spent_ns.values()]
        self._spent_ns = dict.fromkeys(KINDS, 0)
        return spent_s

    @contextmanager
    def following(self) -> Iterator[None]:
        """Notice the waits of this thread for the body of the ``with``; those of other threads, such as that of a save
        in the background, are none of its own."""
        wait, thread = dist.Work.wait, threading.get_ident()

        def noticed(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return wait(work, *args, **kwargs)
            begun_ns = time.monotonic_ns()
            self._slot.wait_since(begun_ns)
            try:
                return wait(work, *args, **kwargs)
            finally:
                self._slot.wait_since(0)
                self._waited_ns += time.monotonic_ns() - begun_ns

        self._queue = _Queue()
        dist.Work.wait = noticed  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            dist.Work.wait = wait  # type: ignore[method-assign]


class _Queue:
    """For how long the system has let the calling thread stand in line for a core."""

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def time_ns(self) -> int:
        """Return the time so far; 0 where the system does not tell."""
        if self._file is None:
            return 0
        ran_and_queued = os.pread(self._file, 64, 0).split()
        return int(ran_and_queued[1])

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)
