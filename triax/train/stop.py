"""How does a run hear that it should stop?"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
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


@contextmanager
def raised_by_signals(error: Exception) -> Iterator[None]:
    """Raise ``error`` where such a signal comes, in the body of the ``with``: there is no state to save yet."""

    def leave(_signal: int, _frame: Any) -> None:
        raise error

    with _handled_by(leave):
        yield


@contextmanager
def _handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Let ``handler`` have the signals for the body of the ``with``; a hang-up that is ignored (``nohup``) stays so.

    What a parent held back until this process could answer comes now.
    """
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    wanted = [number for number in _SIGNALS if not (is_nohup and number == signal.SIGHUP)]
    before = {number: signal.signal(number, handler) for number in wanted}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
