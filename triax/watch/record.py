"""How is what happened written down, so that a kill, a full disk or a resume never makes it unreadable?

Two files in the run folder, one JSON object a line, each line complete in itself with its ``format_version``:

``metrics.jsonl``, written by rank 0 alone, one line a step: ``time`` and the keys of ``triax.watch.metrics``. It is a
log: after a resume or a rollback steps are trained again and their lines follow the old ones. The rule for a reader: *a
line of step s supersedes every earlier line of step s or later*. So the series of the attempt that counts is found even
while it has not caught up with the one before, and the old lines still tell what happened. ``read_metrics`` does it.

``events.jsonl``, written by any process: ``time, step, kind, rank, coordinate, server, detail``.

Floats are written with the digits that read back to the same bits. JSON has no NaN: a number that is not finite is
written as null and named in the ``nonfinite`` object beside it:
``{"train/loss": null, "nonfinite": {"train/loss": "nan"}}``.

Lines are appended in one write each and not forced to disk: a killed process loses nothing, a machine that loses power
loses seconds, which the resumed run trains again. A last line cut off by that is blanked out when the file is next
opened: overwritten, not cut, so that nothing another process appends meanwhile is lost.
"""

import contextlib
import errno
import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from triax.errors import BadInput
from triax.spec.run import FORMAT_VERSION
from triax.watch.metrics import STEP, Metrics

_log = logging.getLogger(__name__)

METRICS_FILE: Final = "metrics.jsonl"
EVENTS_FILE: Final = "events.jsonl"

SERVER: Final = "TRIAX_SERVER"
"""Environment variable that gives this server another name than its host's."""

_NONFINITE: Final = "nonfinite"


def server_name() -> str:
    """Return what this server is called: as the process that started this one says, else by its host name."""
    return os.environ.get(SERVER) or socket.gethostname()


class RunLog:
    """Writes a run's metrics and events. Once open, nothing it does stops training: a failed write is said once."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int | None = 0,
        coordinate: Mapping[str, int] | None = None,
        server: str | None = None,
    ) -> None:
        """Make ``folder`` if need be; raise BadInput if it cannot be written.

        ``rank`` (None: no rank), ``coordinate`` (index along each axis) and ``server`` (default: ``server_name``) sign
        the events.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"the run folder {folder} cannot be made: {error.strerror}; give another one.") from None
        for path in (folder, folder / METRICS_FILE, folder / EVENTS_FILE):
            if path.exists() and not os.access(path, os.W_OK):
                raise BadInput(f"{path} cannot be written: give another run folder, or make this one writable.")
        self._metrics = _LineFile(folder / METRICS_FILE)
        self._events = _LineFile(folder / EVENTS_FILE)
        self._rank = rank
        self._coordinate = dict(coordinate or {})
        self._server = server_name() if server is None else server

    def write(self, metrics: Metrics) -> None:
        """Append one step's metrics. Only the rank that reports calls this."""
        self._metrics.append({"format_version": FORMAT_VERSION, "time": _now(), **metrics})

    def event(self, kind: str, *, step: int, detail: Mapping[str, object] | None = None) -> None:
        """Append that ``kind`` (``resume``, ``save``, ``skip``, ``rollback``, ``stop``, ...) happened at ``step``."""
        self._events.append(
            {
                "format_version": FORMAT_VERSION,
                "time": _now(),
                "step": step,
                "kind": kind,
                "rank": self._rank,
                "coordinate": self._coordinate,
                "server": self._server,
                "detail": dict(detail or {}),
            }
        )

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _now() -> float:
    """Seconds since 1970 (UTC), to the millisecond."""
    return round(time.time(), 3)


class _LineFile:
    """A file that lines are appended to. Opened at the first line, so that a rank that writes none makes none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._may_be_torn = True
        self._lost = 0

    def append(self, values: Mapping[str, object]) -> None:
        line = (encode(values) + "\n").encode()
        try:
            if self._fd is None:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if self._may_be_torn:
                if (said := mend_tail(self._path)) and not self._lost:  # what this log tore itself is said already
                    _log.warning("%s", said)
                self._may_be_torn = False
            if os.write(self._fd, line) != len(line):
                self._may_be_torn = True
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if self._lost == 0:
                _log.warning(
                    "%s cannot be written (%s): training goes on, and its lines are lost until it can be.",
                    self._path, error.strerror,
                )  # fmt: skip
            self._lost += 1
            return
        if self._lost:
            _log.warning("%s is written again; %d lines were lost.", self._path, self._lost)
            self._lost = 0

    def close(self) -> None:
        if self._fd is None:
            return
        # A network mount may report only now that it is full; the run is over and must not fail for its log.
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd = None


def mend_tail(path: Path) -> str | None:
    """Make ``path`` end with a whole line, and return what was done as a sentence; None where nothing was to do.

    A last line that is whole but for its newline is kept. One that is cut off is overwritten with spaces: readers of
    JSON lines pass over a blank line, and what another process appends in this moment stays whole.
    """
    start, tail = _last_piece(path)
    if not tail:
        return None
    if _decode_line(tail) is not None:
        with path.open("ab") as file:
            file.write(b"\n")
        return f"{path}: the last line lacked its end and has it now."
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b" " * (len(tail) - 1) + b"\n")
    return f"{path}: the last line was cut off after {len(tail)} bytes and was blanked out; the lines before are whole."


def _last_piece(path: Path, block: int = 1 << 16) -> tuple[int, bytes]:
    """Return what follows the last newline, and where it starts."""
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        tail = b""
        while start > 0:
            step = min(block, start)
            file.seek(start - step)
            tail = file.read(step) + tail
            start -= step
            newline = tail.rfind(b"\n")
            if newline >= 0:
                return start + newline + 1, tail[newline + 1 :]
        return start, tail


def encode(values: Mapping[str, object]) -> str:
    """Return ``values`` as one line of JSON, see the top of this file; what JSON has no form for becomes its text."""
    return json.dumps(_finite(values), allow_nan=False, default=str)


def _finite(value: object) -> object:
    """Return ``value`` with null for each number that is not finite, named in ``nonfinite`` of its own object; in a
    list, which has no names, such a number becomes text."""
    if isinstance(value, Mapping):
        lost = {str(key): repr(number) for key, number in value.items() if _is_nonfinite(number)}
        kept: dict[str, object] = {str(key): None if str(key) in lost else _finite(item) for key, item in value.items()}
        return kept | {_NONFINITE: lost} if lost else kept
    if isinstance(value, list | tuple):
        return [repr(item) if _is_nonfinite(item) else _finite(item) for item in value]
    return value


def _is_nonfinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _restore(values: dict[str, Any]) -> dict[str, Any]:
    lost = values.pop(_NONFINITE, None)
    if isinstance(lost, dict):
        values |= {key: float(text) for key, text in lost.items()}
    return values


def _decode_line(line: bytes) -> dict[str, Any] | None:
    """Return the object that ``line`` holds, or None where it holds none."""
    try:
        values = json.loads(line, object_hook=_restore)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the run's final series: for each step the line that counts, steps ascending; empty where there is none.

    Reads while a run writes. Raises BadInput where the file was written by a later version of triax or cannot be read.
    """
    series: list[dict[str, Any]] = []
    for line in _read_lines(folder / METRICS_FILE):
        step = line.get(STEP)
        if not isinstance(step, int):
            continue
        while series and series[-1][STEP] >= step:
            series.pop()
        series.append(line)
    return series


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the run's events in the order in which they were written; empty where there is none.

    Raises BadInput where the file was written by a later version of triax or cannot be read.
    """
    return _read_lines(folder / EVENTS_FILE)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        raw = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}.") from None
    lines = []
    for number, text in enumerate(raw, start=1):
        if not text.strip():
            continue
        values = _decode_line(text)
        if values is None:
            if number < len(raw):  # the last piece may be a line that is being written
                _log.warning("%s line %d is not JSON and is passed over.", path, number)
            continue
        version = values.pop("format_version", FORMAT_VERSION)
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise BadInput(
                f"{path} line {number} has format_version {version!r}, and this triax reads up to {FORMAT_VERSION}: "
                f"read it with the version that wrote it."
            )
        lines.append(values)
    return lines
