"""Does Ctrl-C end a command at once, at any moment, with one line and nothing left behind?"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.typed import Told, ended, environment, make_run, started, triax, until

INTERRUPTED_WHILE_LOADED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from triax.__main__ import main
main()
"""


def loading(module: str, folder: Path, before: str = "") -> Told:
    """Show what a run file says; Ctrl-C comes when ``module`` is looked for."""
    make_run(folder)
    script = before + INTERRUPTED_WHILE_LOADED.replace("MODULE", repr(module))
    return ended(started([sys.executable, "-c", script, "config", "show", "run.toml"], folder))


@pytest.mark.parametrize("module", ["triax.cli", "typer", "triax.cli.verify", "triax.train.message", "tomli_w"])
def test_while_modules_are_loaded(module: str, tmp_path: Path) -> None:
    told = loading(module, tmp_path)
    assert (told.code, told.sentence) == (130, "interrupted.")


def test_where_it_is_ignored_as_in_the_background_of_a_shell(tmp_path: Path) -> None:
    for module in ("typer", "tomli_w"):
        told = loading(module, tmp_path, "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n")
        assert (told.code, told.err) == (0, "")


def processes_of(session: int) -> list[str]:
    """What runs in a session, without what has ended and waits to be buried."""
    found = subprocess.run(["ps", "-eo", "sid,stat,args"], capture_output=True, text=True, check=True).stdout
    rows = (line.split(None, 2) for line in found.splitlines()[1:])
    return [args for sid, stat, args in rows if int(sid) == session and not stat.startswith("Z")]


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_verify_is_interrupted_at_once(ranks: int, tmp_path: Path) -> None:
    """Before ranks are there and while they compare; they have nothing to save."""
    make_run(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = triax("verify", "run.toml", "--layout", "dp_shard=2", "--steps", 20)
    process = started(command, tmp_path, environment(TMPDIR=str(scratch)))
    until(lambda: len(processes_of(process.pid)) >= 3 + ranks, process)
    os.killpg(process.pid, signal.SIGINT)
    begun_s = time.monotonic()
    told = ended(process)
    if ranks:  # else torch is loaded to its end first, which takes what the machine lets it
        assert time.monotonic() - begun_s < 8  # half a second where nothing else runs
    assert (told.code, told.sentence) == (130, "interrupted.")
    until(lambda: not processes_of(process.pid), timeout_s=2)
    assert list(scratch.iterdir()) == []
