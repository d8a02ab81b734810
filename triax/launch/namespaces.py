"""How is a network namespace named, shaped, listed and removed? With ``ip`` and ``tc``, which only root may use so.

A name says which process made the namespace, so that what a killed process left is known, and removed.
"""

import contextlib
import itertools
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from triax.errors import BadInput, TriaxError

_PREFIX: Final = "triax"
_SHARED_MEMORY: Final = Path("/dev/shm")
_GONE_S: Final = 10.0
"""How long killed processes may take to be gone."""


class CannotEmulate(BadInput):
    """This machine, or this user, has no network namespaces to give."""


def check_machine() -> None:
    """Raise CannotEmulate, saying what would help, where namespaces cannot be made."""
    if os.geteuid() != 0:
        raise CannotEmulate(
            f"servers cannot be emulated by user {os.geteuid()}, since only root makes network namespaces: use sudo, "
            f"or a container with the capabilities NET_ADMIN and SYS_ADMIN."
        )
    missing = [name for name in ("ip", "tc", "mount", "nsenter") if shutil.which(name) is None]
    if missing:
        raise CannotEmulate(
            f"servers cannot be emulated without {', '.join(missing)}: install iproute2 and util-linux (Debian, "
            f"Ubuntu: apt-get install iproute2 mount util-linux)."
        )


def claim(last_word: str) -> str:
    """Make a namespace named ``PREFIX-last_word``, and return the prefix; it is nobody else's."""
    for number in itertools.count():
        prefix = f"{_PREFIX}-{os.getpid()}-{_start_of(os.getpid())}-{number}"
        if f"{prefix}-{last_word}" in _names():
            continue
        try:
            tool("ip", "netns", "add", f"{prefix}-{last_word}")
        except TriaxError as error:
            raise CannotEmulate(f"servers cannot be emulated: the kernel gives no network namespace: {error}") from None
        return prefix
    raise AssertionError("counting does not end")


def remove_leftovers() -> None:
    """Remove the namespaces of triax whose process is gone, and kill what still runs in them."""
    for name in _names():
        word, pid, start, *_ = (*name.split("-"), "", "")
        if word == _PREFIX and pid.isdecimal() and _start_of(int(pid)) != start:
            remove(name)


def add(name: str) -> None:
    """Make a namespace with a shared memory of its own; whatever had its name before has left nothing there."""
    tool("ip", "netns", "add", name)
    memory_of(name).mkdir(mode=0o1777)


def memory_of(name: str) -> Path:
    """Return the folder that what runs in a namespace has as its ``/dev/shm``."""
    return _SHARED_MEMORY / name


def command_inside(name: str, command: Sequence[str | os.PathLike[str]]) -> list[str | os.PathLike[str]]:
    """Return ``command`` as one that runs in a namespace; the process that starts it becomes it."""
    # What is mounted after `ip netns exec` is seen by this process and those that it starts, and by no other.
    script = f'mount --bind "$0" {_SHARED_MEMORY} && exec "$@"'
    return ["ip", "netns", "exec", name, "sh", "-c", script, memory_of(name), *command]


def remove(name: str) -> None:
    """Kill what runs in a namespace and remove it with its shared memory; nothing where it is gone already."""
    if name not in _names():
        return
    try:
        _kill_all(name)
        shutil.rmtree(memory_of(name), ignore_errors=True)  # it may have none
        tool("ip", "netns", "delete", name)
    except TriaxError:
        if name in _names():  # not removed by another process at the same moment
            raise


def processes(name: str) -> list[int]:
    """Return the ids of all that runs in a namespace."""
    return [int(pid) for pid in tool("ip", "netns", "pids", name).split()]


def tool_at_disks(name: str, *command: str) -> None:
    """Run ``command`` once for each view of the disks that processes in a namespace have."""
    views: set[str] = set()
    for pid in processes(name):
        try:
            view = os.readlink(f"/proc/{pid}/ns/mnt")
            if view not in views:
                tool("nsenter", f"--mount=/proc/{pid}/ns/mnt", *command)
        except (OSError, TriaxError):
            if _start_of(pid) is not None:  # it has not left meanwhile
                raise
            continue
        views.add(view)


def bucket(bytes_per_s: float) -> list[str]:
    """Return how ``tc`` is told of a rate, and of what may be sent at once."""
    # Tokens for 2 ms, or what the kernel sends late would be lost; at least one packet as TCP hands it over.
    burst = max(math.ceil(bytes_per_s * 0.002), 1 << 16)
    return ["rate", f"{math.ceil(bytes_per_s * 8)}bit", "burst", f"{burst}b"]


def shape(name: str, card: str, bytes_per_s: float) -> None:
    """Limit what a card sends, which is not shaped yet; what waits longer than 50 ms is dropped."""
    tool("tc", "-n", name, "qdisc", "add", "dev", card, "root", "tbf", *bucket(bytes_per_s), "latency", "50ms")


def unshape(name: str, card: str) -> None:
    """Let a card send as fast as the machine copies."""
    if "qdisc noqueue" not in tool("tc", "-n", name, "qdisc", "show", "dev", card):
        tool("tc", "-n", name, "qdisc", "delete", "dev", card, "root")


def tool(*command: str) -> str:
    """Return what a command prints; raise TriaxError with its complaint where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[:300] or f"exit code {done.returncode}"
        raise TriaxError(f"`{' '.join(command)}` failed: {said}")
    return done.stdout


def _names() -> list[str]:
    return [line.split()[0] for line in tool("ip", "netns", "list").splitlines() if line.strip()]


def _start_of(pid: int) -> str | None:
    """Return when a process was started, in clock ticks since boot; with its id nobody else's. None: it is gone."""
    try:
        said = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = said.rpartition(")")[2].split()  # the name in parentheses may hold anything
    return None if state in "ZX" else rest[18]


def _kill_all(name: str) -> None:
    deadline_s = time.monotonic() + _GONE_S
    while pids := processes(name):  # again and again: a process may have started another meanwhile
        if time.monotonic() > deadline_s:
            raise TriaxError(f"processes {pids} of an emulated server do not end when killed: look what holds them.")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has left by itself
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
