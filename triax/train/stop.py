"""How does a run hear that it should stop?"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any, Final

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""From a cluster or a person, from a keyboard, Slurm's notice, and a terminal that went away."""

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

    Python may run a handler inside a callback of its own, such as those of imports, and drops what is raised there: the
    signal is then sent again. What else goes wrong once a signal has come is a consequence, such as an import that was
    cut short, and is not told.
    """
    is_asked = False
    told_before = sys.unraisablehook

    def leave(_signal: int, _frame: Any) -> None:
        nonlocal is_asked
        is_asked = True
        raise _Asked

    def ask_again(dropped: "sys.UnraisableHookArgs") -> None:
        if isinstance(dropped.exc_value, _Asked):
            Timer(0.01, os.kill, (os.getpid(), numbers[0])).start()
        else:
            told_before(dropped)

    sys.unraisablehook = ask_again
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
