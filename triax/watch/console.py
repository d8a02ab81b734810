"""What does a person see while a run goes on: one line every few steps, and on a terminal a bar with the time left?"""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, TextIO

from rich.console import Console as Terminal
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from triax.units import format_seconds
from triax.watch.metrics import (
    EVAL_LOSS,
    GRAD_NORM,
    LEARNING_RATE,
    LOSS,
    MFU,
    PEAK_RESERVED_GIB,
    STEP,
    TOKENS_PER_SEC,
    Metrics,
)

_FIELDS: Final[tuple[tuple[str, str, Callable[[float], str]], ...]] = (
    ("step", STEP, "{:>5.0f}".format),
    ("loss", LOSS, "{:>8.5f}".format),
    ("grad_norm", GRAD_NORM, "{:>8.4f}".format),
    ("lr", LEARNING_RATE, "{:.2e}".format),
    ("tokens/s", TOKENS_PER_SEC, "{:>9,.0f}".format),
    ("mfu", MFU, "{:>6.2%}".format),
    ("memory", PEAK_RESERVED_GIB, "{:>5.2f}GiB".format),
    ("eval_loss", EVAL_LOSS, "{:>8.5f}".format),
)

_REFRESH_S: Final = 0.2
"""Between two drawings of the bar: drawing costs milliseconds, and a small model's step is no longer than that."""


def console_line(metrics: Metrics) -> str:
    """Return one step as ``step:    10  loss:  8.10755  grad_norm: ...``: words to read and fields to grep.

    A field whose metric is absent is left out.
    """
    known = ((name, metrics.get(key), form) for name, key, form in _FIELDS)
    return "  ".join(f"{name}: {form(value)}" for name, value, form in known if isinstance(value, int | float))


class Console:
    """A sink for people. On a terminal: lines, and a bar below them. In a pipe or a file: the same lines, nothing else.

    Made by the rank that reports; the others have none. ``NO_COLOR`` is honoured. A reader that goes away (``| head``)
    makes it silent and does not stop training.
    """

    def __init__(self, total_steps: int, *, every: int = 10, quiet: bool = False, stream: TextIO | None = None) -> None:
        """``every``: steps between lines; the first, the last and those with an eval loss are always shown. ``quiet``:
        nothing at all. ``stream``: default standard output."""
        self._total_steps = total_steps
        self._every = every
        self._is_silent = quiet
        self._stream = sys.stdout if stream is None else stream
        terminal = Terminal(file=self._stream, highlight=False, soft_wrap=True)
        self._bar = _Bar(terminal, total_steps) if terminal.is_terminal and not terminal.is_dumb_terminal else None
        self._writes = 0
        self._first_s = 0.0

    def write(self, metrics: Metrics) -> None:
        """Show one step; to be called for each, so that the time left is known."""
        now_s = time.monotonic()
        step = int(metrics[STEP])
        left_s = self._left_s(now_s, step)
        if not self._writes:
            self._first_s = now_s
        is_shown = not self._writes or step % self._every == 0 or step == self._total_steps or EVAL_LOSS in metrics
        self._writes += 1
        eta = "" if left_s is None else f"eta: {format_seconds(left_s)}"
        if is_shown:
            self.say(console_line(metrics) + (f"  {eta}" if eta and step < self._total_steps else ""))
        if self._bar is not None and not self._is_silent:
            bar = self._bar
            self._show(lambda: bar.move(step, eta, now_s))

    def _left_s(self, now_s: float, step: int) -> float | None:
        """Time left, at the pace since the first step of this session (which itself is slow, and is left out)."""
        if not self._writes:
            return None
        return (now_s - self._first_s) / self._writes * max(self._total_steps - step, 0)

    def say(self, text: str) -> None:
        """Show a line, above the bar where there is one."""
        if self._is_silent:
            return
        if self._bar is not None:
            bar = self._bar
            self._show(lambda: bar.print_above(text))
        else:
            self._show(lambda: print(text, file=self._stream, flush=True))

    def _show(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except OSError:
            self._is_silent = True

    def close(self) -> None:
        """Leave the terminal as it was found."""
        if self._bar is not None:
            self._show(self._bar.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Bar:
    """The bar at the bottom of a terminal."""

    def __init__(self, terminal: Terminal, total_steps: int) -> None:
        # No thread of its own draws it: it moves when a step is done, and only then.
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            console=terminal,
            auto_refresh=False,
            expand=True,
        )
        self._task = self._progress.add_task("", total=total_steps)
        self._drawn_s = -_REFRESH_S

    def move(self, step: int, eta: str, now_s: float) -> None:
        self._progress.update(self._task, completed=step, description=eta)
        self._progress.start()  # draws at once, so it comes after; later calls do nothing
        if now_s - self._drawn_s >= _REFRESH_S:
            self._drawn_s = now_s
            self._progress.refresh()

    def print_above(self, text: str) -> None:
        self._progress.console.print(Text(text))

    def close(self) -> None:
        self._progress.refresh()
        self._progress.stop()
