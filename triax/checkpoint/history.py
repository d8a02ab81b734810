"""Which of the states that lie in host memory are of the way that the run has gone?

A run that goes back takes another way, and what it left may still lie in the memory of a server that was away. So each
start and each going back begins a history: a name on the disk, with the names before it and the step up to which each
counts. A state in memory carries the name under which it was saved.
"""

import json
import secrets
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError

from triax.checkpoint.disk import read_small, write_atomically
from triax.errors import BadInput
from triax.spec.value import Value

FILE: Final = "history.json"
"""In the folder of a run's checkpoints."""
_MOST_KEPT: Final = 64
_MOST_BYTES: Final = 1 << 16

Name = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


class Past(Value):
    """A history that was left after ``step``."""

    name: Name
    step: Annotated[int, Field(ge=0)]


class History(Value):
    """The way that a run has gone."""

    format_version: Literal[1] = 1
    name: Name
    """Under which states are saved now."""
    pasts: Annotated[tuple[Past, ...], Field(max_length=_MOST_KEPT)] = ()
    """Newest last."""

    def has(self, name: str, step: int) -> bool:
        """Return whether a state of ``step`` that was saved under ``name`` is of this way."""
        return name == self.name or any(past.name == name and step <= past.step for past in self.pasts)

    def from_step(self, step: int) -> "History":
        """Return the history of a run that goes on from ``step`` of this one."""
        pasts = [Past(name=past.name, step=min(past.step, step)) for past in self.pasts]
        pasts.append(Past(name=self.name, step=step))
        return History(name=secrets.token_hex(8), pasts=tuple(pasts[-_MOST_KEPT:]))


def read_history(folder: Path) -> History | None:
    """Return the history of the checkpoints in ``folder``; None where none can be read, and then no memory counts."""
    try:
        return History.model_validate_json(read_small(folder / FILE, _MOST_BYTES))
    except (OSError, ValidationError, BadInput):
        return None


def begin_history(folder: Path, step: int) -> History:
    """Begin, on the disk, the history of a run that goes on from ``step``. Raises OSError."""
    before = read_history(folder)
    history = History(name=secrets.token_hex(8)) if before is None else before.from_step(step)
    write_atomically(folder / FILE, (json.dumps(history.model_dump(mode="json")) + "\n").encode())
    return history
