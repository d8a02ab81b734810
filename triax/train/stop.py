"""How does a run hear that it should stop?"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from types import FrameType
from typing import Any, Final

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""From a cluster or a person, from a keyboard, Slurm's notice, and a terminal that went away."""

_AGAIN_AFTER_S: Final = 0.1
"""After which a signal is sent again that came where nothing can be raised."""
_LOOK_S: Final = 1.0
"""A network disk takes milliseconds to say that a file is not there."""


class StopWish:
    """Whether this process was asked to stop, by a signal or by a file that somebody made."""

    def __init__(self, file: Path | None = None) -> None:
        """``file``: its existence asks for an end; it is looked for once a second."""
        self.file = file
        self.has_signal = False
        """A signal asked; its handler may do no more than set this."""
        self._next_look_s = 0.0
        self._is_filed = False

    @property
    def is_asked(self) -> bool:
        """Whether this process should stop now."""
        if self.has_signal or self._is_filed or self.file is None:
            return self.has_signal or self._is_filed
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s, self._is_filed = now_s + _LOOK_S, self.file.exists()
        return self._is_filed


@contextmanager
def stop_signals(wish: StopWish) -> Iterator[None]:
    """Turn the signals that ask for an end into ``wish``, for the body of the ``with``."""

    def ask(_signal: int, _frame: Any) -> None:
        wish.has_signal = True

    with _handled_by(ask):
        yield


class _Asked(BaseException):
    """No ``except Exception`` on its way stops it; it never leaves this module."""


@contextmanager
def raised_by_signals(error: BaseException, numbers: Sequence[signal.Signals] = SIGNALS) -> Iterator[None]:
    """Raise ``error`` where one of the signals comes, in the body of the ``with``: there is no state to save yet.

    Nothing is raised inside an import: C++ that runs there, such as torch's, aborts the process where Python raises
    into it. Python may run a handler inside a callback of its own, and drops what is raised there. In both cases the
    signal is sent again. What else goes wrong once a signal has come is a consequence, and is not told.
    """
    is_asked = False
    told_before = sys.unraisablehook

    def send_again() -> None:
        again = Timer(_AGAIN_AFTER_S, os.kill, (os.getpid(), numbers[0]))
        again.daemon = True
        again.start()

    def leave(_signal: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        is_asked = True
        if _is_import(frame):
            send_again()
        else:
            raise _Asked

    def told(dropped: "sys.UnraisableHookArgs") -> None:
        if isinstance(dropped.exc_value, _Asked):
            send_again()
        else:
            told_before(dropped)

    sys.unraisablehook = told
    try:
        with _handled_by(leave, numbers):
            yield
    except BaseException:
        if not is_asked:
            raise
    finally:
        sys.unraisablehook = told_before
    if is_asked:
        raise error from None


def _is_import(frame: FrameType | None) -> bool:
    """Return whether a module is loaded in ``frame`` or in what has called it."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


@contextmanager
def _handled_by(handler: Callable[[int, Any], None], numbers: Sequence[signal.Signals] = SIGNALS) -> Iterator[None]:
    """Let ``handler`` have the signals for the body of the ``with``; a hang-up that is ignored (``nohup``) stays so.

    What a parent held back until this process could answer comes now.
    """
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    wanted = [number for number in numbers if not (is_nohup and number == signal.SIGHUP)]
    before = {number: signal.signal(number, handler) for number in wanted}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
