"""Which changes does saving make to a disk? All go through here, so that tests can see, delay, refuse and undo each."""

import os
from contextlib import suppress
from pathlib import Path


def make_folder(path: Path) -> None:
    """Make a folder. Raises FileExistsError where there is something of that name."""
    os.mkdir(path)


def open_new(path: Path) -> int:
    """Make an empty file and return its descriptor. Raises FileExistsError where there is something of that name."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write(descriptor: int, data: memoryview) -> int:
    """Append bytes to a file and return how many it took."""
    return os.write(descriptor, data)


def sync(descriptor: int) -> None:
    """Bring what a file holds, or the names in a folder, to the disk."""
    os.fsync(descriptor)


def rename(old: Path, new: Path) -> None:
    """Give a file another name, in place of the file that may have it."""
    os.replace(old, new)


def unlink(path: Path) -> None:
    """Remove a file if it is there."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    os.rmdir(path)
