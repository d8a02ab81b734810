"""Where else do metrics go, to be looked at? A sink may fail, training goes on: ``metrics.jsonl`` is the record."""

import contextlib
import logging
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from triax.watch.metrics import STEP, TOKENS, Metrics

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

_log = logging.getLogger(__name__)

_FLUSH_S: Final = 10
"""Seconds after which a curve shows what was added."""


class Sink(Protocol):
    """Takes the metrics of each step."""

    def write(self, metrics: Metrics) -> None:
        """Take one step's metrics; they hold at least ``step`` and ``tokens``."""

    def close(self) -> None:
        """Give out what is still held back; nothing is written afterwards."""


class Unfailing:
    """A sink that never stops training: when the sink in it fails, this is said once and the sink is left out.

    It is not tried again, since a service that does not answer would cost its time limit in every step.
    """

    def __init__(self, sink: Sink, name: str) -> None:
        """``name`` is how the warning calls it."""
        self._sink: Sink | None = sink
        self._name = name

    def write(self, metrics: Metrics) -> None:
        """Hand ``metrics`` on while the sink works."""
        if self._sink is None:
            return
        try:
            self._sink.write(metrics)
        except Exception as error:  # whatever a sink's library raises, training goes on
            self._give_up(error)

    def close(self) -> None:
        """Close the sink if it still works."""
        if self._sink is None:
            return
        try:
            self._sink.close()
        except Exception as error:
            self._give_up(error)
        self._sink = None

    def _give_up(self, error: Exception) -> None:
        _log.warning(
            "%s failed and gets nothing more (%s: %s): training goes on, and metrics.jsonl has every step.",
            self._name, type(error).__name__, error,
        )  # fmt: skip
        failed, self._sink = self._sink, None
        with contextlib.suppress(Exception):
            if failed is not None:
                failed.close()


class TensorBoardSink:
    """Writes scalars for TensorBoard: all against the step, and losses against tokens too.

    The two stand in folders of their own, ``step`` and ``tokens``, because TensorBoard forgets what a resumed or rolled
    back run superseded by one number for a whole folder.
    """

    def __init__(self, folder: Path) -> None:
        """``folder`` is made at the first write; so is the import of TensorBoard, which takes its time."""
        self._by_step = _Curve(folder / "step")
        self._by_tokens = _Curve(folder / "tokens")

    def write(self, metrics: Metrics) -> None:
        """Add one step's numbers; text, such as a hash, has no curve and is left out."""
        numbers = {key: value for key, value in metrics.items() if not isinstance(value, str) and key != STEP}
        losses = {f"by_tokens/{key}": numbers[key] for key in numbers if key.partition("/")[0] in ("train", "eval")}
        self._by_step.add(numbers, int(metrics[STEP]))
        self._by_tokens.add(losses, int(metrics[TOKENS]))

    def close(self) -> None:
        """Write out and close both."""
        self._by_step.close()
        self._by_tokens.close()


class _Curve:
    """Scalars against one x, in one file after another.

    One record a step, in this thread: torch's ``SummaryWriter`` writes one a scalar, through a queue, which costs a
    small model a noticeable part of its step, and tells of a full disk by a traceback from its thread.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: RecordWriter | None = None
        self._last_x = 0
        self._flushed_s = 0.0

    def add(self, values: Metrics, x: int) -> None:
        if self._file is None or x <= self._last_x:
            self._open(x)
        self._last_x = x
        self._write(step=x, summary={"value": [{"tag": key, "simple_value": value} for key, value in values.items()]})

    def _open(self, x: int) -> None:
        """Begin a file with the note that everything from ``x`` on is superseded."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names, and knows them by the first three words.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
        self._file = RecordWriter((self._folder / name).open("xb"))
        self._write(file_version="brain.Event:2")
        self._write(step=x, session_log={"status": "START"})

    def _write(self, **event: object) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

        assert self._file is not None
        now_s = time.time()
        self._file.write(Event(wall_time=now_s, **event).SerializeToString())
        if now_s - self._flushed_s >= _FLUSH_S:
            self._flushed_s = now_s
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()
