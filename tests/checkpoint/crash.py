"""What may a disk hold after a power failure in the middle of a save? Every change is recorded and replayed.

The model is a file system that promises no more than POSIX does: what a file holds is safe once the file was synced, a
name once its folder was synced, and until then each name may be the one before or any since, in any combination, and
a file may be torn, empty or zeros. Renames can so be lost, and come before what was done first.
"""

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from triax.checkpoint import operations


@dataclass(frozen=True)
class Change:
    """One operation on a disk. ``kind`` is its name in triax.checkpoint.operations, or ``mark``."""

    kind: str
    path: str
    """Below the folder that is watched; for a mark its text."""
    to: str = ""
    data: str = ""
    """Bytes as hexadecimal digits."""
    at_ns: int = 0


@dataclass
class Record:
    """The changes below a folder, in the order in which they were done."""

    root: Path
    changes: list[Change] = field(default_factory=list)

    def mark(self, text: str) -> None:
        """Note a moment between changes."""
        self.changes.append(Change("mark", text, at_ns=time.monotonic_ns()))

    def note(self, kind: str, path: Path, to: Path | None = None, data: bytes = b"") -> None:
        """Note a change that was done."""
        if path.is_relative_to(self.root):
            target = "" if to is None else str(to.relative_to(self.root))
            where = str(path.relative_to(self.root))
            self.changes.append(Change(kind, where, target, data.hex(), time.monotonic_ns()))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps([asdict(change) for change in self.changes]))


def merged(*paths: Path) -> list[Change]:
    """The changes that several processes have saved, as they happened on the machine's one clock."""
    changes = [Change(**fields) for path in paths for fields in json.loads(path.read_text())]
    return sorted(changes, key=lambda change: change.at_ns)


@contextmanager
def recorded(root: Path) -> Iterator[Record]:
    """Record what this process changes below ``root``."""
    record = Record(root)
    original = {name: getattr(operations, name) for name in NAMES}

    def path_of(descriptor: int) -> Path:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))

    def simple(name: str) -> Callable[..., Any]:
        def do(path: Path) -> Any:
            result = original[name](path)
            record.note(name, path)
            return result

        return do

    def write(descriptor: int, data: memoryview) -> int:
        num_bytes: int = original["write"](descriptor, data)
        record.note("write", path_of(descriptor), data=bytes(data[:num_bytes]))
        return num_bytes

    def sync(descriptor: int) -> None:
        original["sync"](descriptor)
        record.note("sync", path_of(descriptor))

    def rename(old: Path, new: Path) -> None:
        original["rename"](old, new)
        record.note("rename", old, to=new)

    done = {name: simple(name) for name in ("make_folder", "open_new", "unlink", "remove_folder")}
    with patch.multiple(operations, **done, write=write, sync=sync, rename=rename):
        yield record


NAMES = ("make_folder", "open_new", "write", "sync", "rename", "unlink", "remove_folder")


@dataclass
class _File:
    safe: bytes
    """What a power failure cannot take."""
    written: bytes

    def candidates(self) -> list[bytes]:
        if self.written == self.safe:
            return [self.safe]
        return [self.written, self.safe, self.written[: len(self.written) // 2], bytes(len(self.written))]


_Entry = _File | str | None
"""What a name stands for: a file, ``"folder"``, or nothing."""

Pick = Callable[[str, Sequence[Any]], Any]
"""Chooses what became of a name or a file, among what may have: the newest first, the safest second."""


class Disk:
    """What is on a disk, and what a power failure may make of it."""

    def __init__(self, safe: Mapping[str, bytes]) -> None:
        self._names: dict[str, dict[str, list[_Entry]]] = {"": {}}
        """For each folder and name: what it stands for now, last, and before that since the folder was synced."""
        for path, data in safe.items():
            *parents, _ = path.split("/")
            for depth in range(1, len(parents) + 1):
                folder = "/".join(parents[:depth])
                self._names.setdefault(folder, {})
                self._entries(folder).setdefault(parents[depth - 1], ["folder"])
            self._set(path, _File(data, data))
        for names in self._names.values():
            for name in names:
                names[name] = names[name][-1:]

    def apply(self, change: Change) -> None:
        """Do a change."""
        now = self._now(change.path) if change.kind != "mark" else None
        match change.kind:
            case "make_folder":
                self._set(change.path, "folder")
                self._names[change.path] = {}
            case "open_new":
                self._set(change.path, _File(b"", b""))
            case "write":
                assert isinstance(now, _File)
                now.written += bytes.fromhex(change.data)
            case "sync" if isinstance(now, _File):
                now.safe = now.written
            case "sync":
                names = self._names["" if change.path == "." else change.path]
                for name in names:
                    names[name] = names[name][-1:]
            case "rename":
                self._set(change.to, now)
                self._set(change.path, None)
            case "unlink" | "remove_folder":
                self._set(change.path, None)

    def after_a_crash(self, pick: Pick) -> dict[str, bytes | None]:
        """What is there when the power is back: for each file what it holds, for each folder None."""
        left: dict[str, bytes | None] = {}
        self._collect("", pick, left)
        return left

    def _collect(self, folder: str, pick: Pick, left: dict[str, bytes | None]) -> None:
        for name, history in self._names.get(folder, {}).items():
            path = f"{folder}/{name}" if folder else name
            # Newest first; then the oldest, which is the only one that is safe.
            entry = pick(path, [history[-1], history[0], *history[1:-1]] if len(history) > 1 else history)
            if entry == "folder":
                left[path] = None
                self._collect(path, pick, left)
            elif isinstance(entry, _File):
                left[path] = pick(f"{path} holds", entry.candidates())

    def _entries(self, path: str) -> dict[str, list[_Entry]]:
        return self._names[path.rpartition("/")[0]]

    def _now(self, path: str) -> _Entry:
        history = self._entries(path).get(path.rpartition("/")[2])
        return history[-1] if history else None

    def _set(self, path: str, entry: _Entry) -> None:
        self._entries(path).setdefault(path.rpartition("/")[2], [None]).append(entry)


def newest(_path: str, may_be: Sequence[Any]) -> Any:
    """Everything was written through: a process that was killed."""
    return may_be[0]


def safest(_path: str, may_be: Sequence[Any]) -> Any:
    """Nothing was that had not to be."""
    return may_be[min(1, len(may_be) - 1)]


def picks(disk: Disk, num_random: int, seed: int) -> Iterator[Pick]:
    """Both extremes, each with any one choice made differently, and some at random."""
    chosen: list[str] = []

    def listen(path: str, may_be: Sequence[Any]) -> Any:
        if len(may_be) > 1:
            chosen.append(path)
        return may_be[0]

    disk.after_a_crash(listen)
    yield newest
    yield safest
    for odd in dict.fromkeys(chosen):
        for other in (1, 2, 3):
            yield lambda path, may_be, odd=odd, other=other: may_be[min(other, len(may_be) - 1) if path == odd else 0]
        yield lambda path, may_be, odd=odd: may_be[0] if path == odd else safest(path, may_be)
    chance = random.Random(seed)
    for _ in range(num_random if chosen else 0):
        yield lambda _path, may_be: chance.choice(may_be)


def laid_out(left: Mapping[str, bytes | None], folder: Path) -> None:
    """Make a folder that holds what is left."""
    folder.mkdir()
    for path, data in left.items():
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
