"""Is the run's folder one and the same for all servers, on a disk that keeps what a checkpoint relies on?

A checkpoint is a new file, brought to the disk, that is given its name in one step. Exactly this is done, and every
server looks for it.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

from triax.checkpoint.disk import sentence, write_atomically

_PATIENCE_S: Final = 10.0
"""Network file systems show a new name to others after seconds: NFS keeps what it knows of a folder for up to 60 s, but
looks again for a name that it does not know."""
_TOKEN: Final = "token"


def leave_token(folder: Path) -> tuple[str, str | None]:
    """Make a folder for this check inside ``folder`` and leave a token in it; return its name, and what is wrong with
    the disk as the end of a sentence (None: nothing)."""
    try:
        inside = Path(tempfile.mkdtemp(prefix=".doctor-", dir=folder))
    except OSError as error:
        return "", f"cannot be written: {sentence(error)}"
    try:
        # Twice: replacing a file is another operation than giving a first name.
        for text in ("first", inside.name):
            write_atomically(inside / _TOKEN, text.encode())
        if (inside / _TOKEN).read_text() != inside.name:
            return inside.name, "gives back an old file where it was replaced"
        _lock_twice(inside)
    except OSError as error:
        return inside.name, f"cannot be relied on: {sentence(error)}"
    return inside.name, None


def answer_token(folder: Path, name: str, server: int, patience_s: float = _PATIENCE_S) -> str | None:
    """Look for the token that another server left, and leave an answer; return what is wrong, or None."""
    token = folder / name / _TOKEN
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            if token.read_text() == name:
                break
        except OSError:
            pass
        if time.monotonic() > deadline_s:
            return f"does not show within {patience_s:g} s what the first server wrote there"
        time.sleep(0.1)
    try:
        write_atomically(folder / name / f"answer-{server}", b"here")
    except OSError as error:
        return f"cannot be written: {sentence(error)}"
    return None


def missing_answers(folder: Path, name: str, servers: list[int], patience_s: float = _PATIENCE_S) -> list[int]:
    """Return the servers whose answer the first server does not see."""
    deadline_s = time.monotonic() + patience_s
    while True:
        missing = [server for server in servers if not (folder / name / f"answer-{server}").exists()]
        if not missing or time.monotonic() > deadline_s:
            return missing
        time.sleep(0.1)


def remove_token(folder: Path, name: str) -> None:
    """Remove what this check has made."""
    if name:
        shutil.rmtree(folder / name, ignore_errors=True)


def _lock_twice(folder: Path) -> None:
    """Raise OSError where a new file can be made twice: a generation of servers is decided by who makes one."""
    path = folder / "once"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    raise OSError(None, "it lets two servers make the same new file")
