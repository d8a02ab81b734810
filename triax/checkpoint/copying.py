"""How is a state copied beside the step that comes after it, and who waits for whom?

Forward and backward only read weights and optimizer state. So the copy may go on until the next update, which waits for
it; on a card it runs on a stream of its own.
"""

import threading
from collections.abc import Mapping, Sequence

import torch

from triax.checkpoint.part import Part
from triax.checkpoint.state import Slice


class Copying:
    """One copy of this rank's blocks to host memory."""

    def __init__(self, part: Part, slices: Mapping[str, Sequence[Slice]]) -> None:
        """Called where the state is as it is to be saved: what was enqueued on the card by now belongs to it."""
        self._part, self._slices = part, slices
        pieces = (piece.local for of_tensor in slices.values() for piece in of_tensor)
        self._device = next((local.device for local in pieces if local.is_cuda), None)
        self._is_underway = threading.Event()
        self._ready = self._done = None
        if self._device is not None:
            self._ready, self._done = torch.cuda.Event(), torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self._device))

    def run(self) -> None:
        """Copy, on any thread; afterwards host memory holds the state. Raises MemoryError or RuntimeError."""
        try:
            self._enqueue()
        finally:
            self._is_underway.set()
        if self._done is not None:
            self._done.synchronize()

    def wait(self) -> None:
        """Return when the state may be changed; on a card, when what is enqueued from now on comes after the copy."""
        self._is_underway.wait()
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def _enqueue(self) -> None:
        if self._device is None or self._ready is None or self._done is None:
            self._part.copy(self._slices, is_pinned=False)
            return
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):  # of this thread alone, and makes its device the current one
            stream.wait_event(self._ready)
            self._part.copy(self._slices, is_pinned=True)
            self._done.record(stream)
