"""How do commands that were started by hand on several servers find each other? By files in a folder they share."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from triax.errors import BadInput, TriaxError
from triax.launch.board import Board
from triax.launch.members import Beat
from triax.units import format_seconds

_LOOK_S: Final = 0.25
_READ_WITHIN_S: Final = 10.0
"""For how long a server that has all it wants stays for one that is slow to read."""
_MOST_NAMED: Final = 8


@contextmanager
def meeting(folder: Path, me: Beat, count: int, patience_s: float) -> Iterator[tuple[Beat, ...]]:
    """Give what ``count`` servers say of themselves, this one among them, in the order of their names: the same on each
    of them. What was written goes with the ``with``, once all have read it.

    Raises TriaxError where too few come within ``patience_s``; BadInput where too many come, where two have one name,
    and where ``folder`` cannot be written.
    """
    try:
        board = Board(folder)
        try:
            here = _Meeting(board, folder, me, count).gather(patience_s)
            try:
                yield here
            finally:
                _wait_until_read(board, here)
        finally:
            board.leave(me)
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadInput(
            f"{folder.parent} cannot be written: {reason}; give a folder on a disk that all servers share (--run-dir)."
        ) from None
    finally:
        with suppress(OSError):  # others are still there
            folder.rmdir()


@dataclass(slots=True)
class _Meeting:
    """One server's view of who has come."""

    board: Board
    folder: Path
    me: Beat
    count: int

    def gather(self, patience_s: float) -> tuple[Beat, ...]:
        gives_up_s = time.monotonic() + patience_s
        old = {beat.server: (beat.start, beat.count) for beat in self.board.beats()}
        here: dict[str, Beat] = {}
        while True:
            self.me = replace(self.me, count=self.me.count + 1, sees=tuple(sorted({*here, self.me.server})))
            self.board.write_beat(self.me)
            for beat in self.board.beats():
                if old.get(beat.server) == (beat.start, beat.count):
                    continue  # left by one that is long gone, or that has not written again yet
                old.pop(beat.server, None)
                here[beat.server] = beat
            self._refuse_too_many(here)
            if len(here) == self.count and all(set(beat.sees) == here.keys() for beat in here.values()):
                self.board.write_beat(replace(self.me, state="running"))
                return tuple(here[name] for name in sorted(here))
            if time.monotonic() > gives_up_s:
                raise TriaxError(self._who_is_missing(here, patience_s))
            time.sleep(_LOOK_S)

    def _refuse_too_many(self, here: dict[str, Beat]) -> None:
        if here[self.me.server].start != self.me.start:
            raise BadInput(
                f"another command takes part as server {self.me.server}: give each its own name with --server."
            )
        if len(here) > self.count:
            raise BadInput(f"--nnodes {self.count} servers were said, and there are {_named(here)}: say so many.")

    def _who_is_missing(self, here: dict[str, Beat], patience_s: float) -> str:
        return (
            f"{len(here)} of {self.count} servers came to {self.folder.parent} within {format_seconds(patience_s)}: "
            f"{_named(here)}; start the command on each, with a --run-dir on a disk that all of them share."
        )


def _wait_until_read(board: Board, here: tuple[Beat, ...]) -> None:
    """Return when no server of ``here`` looks for the others any more; one that has gone does not."""
    gives_up_s = time.monotonic() + _READ_WITHIN_S
    starts = {(beat.server, beat.start) for beat in here}
    while any((beat.server, beat.start) in starts and beat.state == "waiting" for beat in board.beats()):
        if time.monotonic() > gives_up_s:
            return
        time.sleep(_LOOK_S)


def _named(here: dict[str, Beat]) -> str:
    names = [f"{name} ({here[name].address})" for name in sorted(here)]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
