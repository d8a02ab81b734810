"""How does somebody hear at once that something is wrong with a run: by a program of their own, or over the network?

An alert is an event as JSON. It never keeps training waiting and never fails it: a thread sends one after the other,
each gets so many seconds, and what cannot be sent is said once in the log. Torch-free: ranks and agents use the same.
"""

import json
import logging
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from triax.spec.run import FORMAT_VERSION, GuardSpec

_log = logging.getLogger("triax")

ALERTING: Final = frozenset(
    {"spike", "skip", "rollback", "corruption", "stopped_by_guard", "hang", "failure", "lost_server", "given_up"}
)
"""Kinds of events that are worth an alert."""

_TIMEOUT_S: Final = 10.0
"""For one program or one POST."""

_MOST_WAITING: Final = 32
"""Alerts that wait to be sent; more are dropped, for nobody reads a hundred."""


class Alerts:
    """Sends events to whoever a run's ``[guard]`` names; without a name it does nothing."""

    def __init__(self, spec: GuardSpec, run: str, *, timeout_s: float = _TIMEOUT_S) -> None:
        """``run`` is the run's folder, which every alert names."""
        self._command, self._webhook, self._run, self._timeout_s = (
            spec.alert_command,
            spec.alert_webhook,
            run,
            timeout_s,
        )
        self._waiting: queue.Queue[bytes] = queue.Queue(_MOST_WAITING)
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._has_complained = False

    def send_event(self, kind: str, step: int, detail: Mapping[str, object], place: Mapping[str, object]) -> None:
        """Send that ``kind`` happened at ``place`` (rank, coordinate, server), if that is worth an alert."""
        if kind in ALERTING:
            self.send({"step": step, "kind": kind, **place, "detail": dict(detail)})

    def send(self, event: Mapping[str, object]) -> None:
        """Send ``event``, the values of one line of events.jsonl, soon; returns at once."""
        if not self._command and self._webhook is None:
            return
        said = {"format_version": FORMAT_VERSION, "time": round(time.time(), 3), "run": self._run, **event}
        try:
            self._waiting.put_nowait(json.dumps(said, default=str).encode())
        except queue.Full:
            self._complain("too many wait to be sent")
            return
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="alerts", daemon=True)
                self._thread.start()

    def close(self, patience_s: float = _TIMEOUT_S) -> None:
        """Wait until all was sent, and no longer than ``patience_s``."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(lambda: not self._waiting.unfinished_tasks, patience_s)

    def _work(self) -> None:
        while True:
            message = self._waiting.get()
            with suppress(Exception):  # nothing about an alert may matter to training; each way says what failed
                self._send(message)
            self._waiting.task_done()

    def _send(self, message: bytes) -> None:
        if self._command:
            self._tell(run_command(self._command, message, self._timeout_s), f"alert_command {self._command[0]}")
        if self._webhook is not None:
            self._tell(post(self._webhook, message, self._timeout_s), "alert_webhook")

    def _tell(self, failure: str, what: str) -> None:
        if failure:
            self._complain(f"{what} {failure}")

    def _complain(self, reason: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            _log.warning("an alert was not sent: %s; training goes on, and this is said once.", reason)


def run_command(command: Sequence[str], message: bytes, timeout_s: float) -> str:
    """Run a program with ``message`` on its standard input; return how it failed, empty where it did not.

    After ``timeout_s`` it is killed with all that it has started, and it is always waited for.
    """
    try:
        process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return f"cannot be started: {error}"
    try:
        process.communicate(message, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"was ended after {timeout_s:g} s"
    return f"left with exit code {process.returncode}" if process.returncode else ""


def post(address: str, message: bytes, timeout_s: float) -> str:
    """POST ``message`` to ``address``; return how that failed, empty where it did not."""
    headers = {"Content-Type": "application/json", "User-Agent": "triax"}
    request = urllib.request.Request(address, message, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s):
            return ""
    except (OSError, ValueError) as error:
        return f"was not reached: {error}"
