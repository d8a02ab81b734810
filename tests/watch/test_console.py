"""Can the console line be grepped, is a pipe free of bars and colours, and has a terminal a bar with the time left?"""

import fcntl
import io
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from triax.watch.console import Console, console_line
from triax.watch.metrics import MetricValue

METRICS: dict[str, MetricValue] = {
    "step": 10, "tokens": 40960, "train/loss": 8.107551, "train/grad_norm": 1.47774, "train/lr": 3e-4,
    "throughput/tokens_per_sec": 3294.4, "throughput/device/mfu": 0.00083, "memory/peak_reserved_gib": 9.4641,
    "data/sample_hash": "00ff",
}  # fmt: skip
LINE = re.compile(
    r"step: +(?P<step>\d+)  loss: +(?P<loss>[\d.]+|nan|inf)  grad_norm: +(?P<grad_norm>[\d.]+|nan|inf)"
    r"  lr: (?P<lr>[\d.e+-]+)  tokens/s: +(?P<tokens_per_s>[\d,]+)(  mfu: +(?P<mfu>[\d.]+)%)?"
    r"(  memory: +(?P<memory>[\d.]+)GiB)?(  eval_loss: +(?P<eval_loss>[\d.]+))?(  eta: (?P<eta>[\w. ]+))?"
)


def fields(line: str) -> dict[str, str | None]:
    match = LINE.fullmatch(line)
    assert match, line
    return match.groupdict()


def test_the_line_reads_back() -> None:
    assert console_line(METRICS) == (
        "step:    10  loss:  8.10755  grad_norm:   1.4777  lr: 3.00e-04  tokens/s:     3,294  mfu:  0.08%  "
        "memory:  9.46GiB"
    )
    assert fields(console_line(METRICS | {"eval/loss": 7.5}))["eval_loss"] == "7.50000"


def test_what_is_not_known_is_left_out_and_what_is_not_finite_is_shown() -> None:
    metrics = METRICS | {"train/loss": math.nan, "train/grad_norm": math.inf}
    del metrics["throughput/device/mfu"]
    read = fields(console_line(metrics))
    assert (read["loss"], read["grad_norm"], read["mfu"]) == ("nan", "inf", None)


def run(stream: io.StringIO, steps: range, total: int, *, every: int = 10, quiet: bool = False) -> list[str]:
    with Console(total, every=every, quiet=quiet, stream=stream) as console:
        for step in steps:
            console.write(METRICS | {"step": step} | ({"eval/loss": 2.0} if step == 13 else {}))
        console.say("saved")
    return stream.getvalue().splitlines()


def test_a_pipe_gets_plain_lines_every_few_steps() -> None:
    *lines, last = run(io.StringIO(), range(5, 26), total=25)
    assert last == "saved"
    assert [fields(line)["step"] for line in lines] == ["5", "10", "13", "20", "25"]
    etas = [fields(line)["eta"] for line in lines]
    assert etas[0] is None, "nothing is known at the first step"
    assert etas[-1] is None, "nothing is left at the last"
    assert all(etas[1:-1])


def test_the_time_left_is_the_pace_times_the_steps_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    stream = io.StringIO()
    console = Console(100, every=10, stream=stream)
    for step in range(51, 61):  # a resumed run: its pace is that of its own steps
        console.write(METRICS | {"step": step})
        now_s += 3.0
    assert fields(stream.getvalue().splitlines()[-1])["eta"] == "2 min 00 s"


def test_quiet_shows_nothing() -> None:
    assert run(io.StringIO(), range(1, 30), total=29, quiet=True) == []


def test_a_reader_that_goes_away_stops_nothing() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    run(Broken(), range(1, 30), total=29)


def on_a_terminal(tmp_path: Path, **environment: str) -> str:
    """What a terminal of 60 columns is sent by twelve steps of a hundred."""
    script = tmp_path / "steps.py"
    script.write_text(
        "from triax.watch.console import Console\n"
        f"metrics = {METRICS!r}\n"
        "with Console(100, every=10) as console:\n"
        "    for step in range(1, 13):\n"
        "        console.write(metrics | {'step': step})\n"
    )
    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    done = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=inside, env=clean | {"TERM": "xterm-256color", "PYTHONPATH": os.getcwd()} | environment,
    )  # fmt: skip
    os.close(inside)
    sent = b""
    try:
        while piece := os.read(outside, 65536):
            sent += piece
    except OSError:  # a terminal whose last user is gone reads as an error
        pass
    os.close(outside)
    assert done.wait(timeout=60) == 0
    return sent.decode()


COLOUR = re.compile(r"\x1b\[[\d;]*(3|9|38;5;)\d+[\d;]*m")
CONTROL = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")


def test_a_terminal_gets_lines_and_a_bar_with_the_time_left(tmp_path: Path) -> None:
    sent = on_a_terminal(tmp_path)
    # To go back to the start of a row and draw over it is, for reading, a new line.
    shown = CONTROL.sub("", sent).replace("\r", "\n")
    lines = [line for line in shown.splitlines() if line.startswith("step:")]
    assert [fields(line)["step"] for line in lines] == ["1", "10"], "lines are whole, although longer than 60 columns"
    assert "step 12/100" in shown
    assert re.search(r"12%.*eta: ", shown)
    assert COLOUR.search(sent)
    assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l"), "the cursor is back"


def test_no_color_is_honoured(tmp_path: Path) -> None:
    sent = on_a_terminal(tmp_path, NO_COLOR="1")
    assert "step 12/100" in CONTROL.sub("", sent)
    assert not COLOUR.search(sent)


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(tmp_path: Path) -> None:
    assert "\x1b" not in on_a_terminal(tmp_path, TERM="dumb")
