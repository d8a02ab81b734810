"""Does a signal before the first step end the run, whatever code it arrives in?"""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from triax.errors import Preempted
from triax.train.stop import raised_by_signals

STOPPED = Preempted("stopped")


def be_asked() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def catch_every_exception() -> None:
    with suppress(Exception):
        be_asked()
    raise AssertionError("the signal was lost")


def fail_by_it() -> None:
    """As a module that was cut short while it was imported."""
    try:
        be_asked()
    except BaseException:
        raise ImportError("cannot import name 'x'") from None


def swallow_everything() -> None:
    with suppress(BaseException):
        be_asked()


class Callback:
    """Asks while Python runs a callback, and drops what that raises."""

    def __del__(self) -> None:
        be_asked()


def drop_it() -> None:
    callback = Callback()
    del callback
    time.sleep(10)
    raise AssertionError("the signal was lost")


@pytest.mark.parametrize("body", [be_asked, catch_every_exception, fail_by_it, swallow_everything, drop_it])
def test_it_ends_the_run(body: Callable[[], None], capfd: pytest.CaptureFixture[str]) -> None:
    hook, begun_s = sys.unraisablehook, time.monotonic()
    with pytest.raises(Preempted), raised_by_signals(STOPPED):
        body()
    assert sys.unraisablehook is hook
    assert capfd.readouterr().err == ""
    assert time.monotonic() - begun_s < 5


def test_an_import_is_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ in it may abort the process."""
    (tmp_path / "asks_when_loaded.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\nfor _ in range(9): pass\nis_whole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(Preempted), raised_by_signals(STOPPED):
            import_and_go_on()
        assert sys.modules["asks_when_loaded"].is_whole
    finally:
        sys.modules.pop("asks_when_loaded", None)


def import_and_go_on() -> None:
    import_module("asks_when_loaded")
    time.sleep(10)
    raise AssertionError("the signal was lost")


def test_without_a_signal_nothing_is_hidden() -> None:
    with pytest.raises(ZeroDivisionError), raised_by_signals(STOPPED):
        raise ZeroDivisionError
