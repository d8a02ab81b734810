"""Where does every local rank stand, and how did it end? Known to the process that started it, also of a killed rank.

A file that all of them have in memory, with a part for each rank: its slot (``triax.parallel.slot``), which it writes
to at every action, and its last word. Torch-free.
"""

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from triax.parallel.slot import SLOT_BYTES, Slot
from triax.spec.layout import Layout

_RANK_BYTES: Final = 1024
"""For each rank its slot, and what is left for its ending."""

Ending = Literal["none", "told", "lost"]
"""none: the rank ended well, was killed or still runs. told: it has told by itself why it failed. lost: it failed only
because a peer had gone or did not answer. In both cases its last word says more."""

NO_ANSWER: Final = "had no answer from a peer"
"""What a rank says that waited in vain."""

_USUAL_CAUSE: Final = {
    "was killed by SIGABRT": " (so a collective ends whose sizes differ between ranks)",
    "was killed by SIGKILL": " (so a system ends a process that takes its last memory)",
}
_MOST_NAMED: Final = 3

_STEP: Final = re.compile(r"\bstep ([0-9]+)\b")

_ENDINGS: Final[tuple[Ending, ...]] = ("none", "told", "lost")


class Places:
    """What all local ranks tell of themselves."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memoryview(memory)

    def slot(self, rank: int) -> Slot:
        """Return what ``rank`` writes to while it runs."""
        start = rank * _RANK_BYTES
        return Slot(self._memory[start : start + SLOT_BYTES])

    def phase(self, rank: int) -> str:
        """Return the phase in which ``rank`` was last."""
        return self.slot(rank).phase

    def end(self, rank: int, ending: Ending, last_word: str = "") -> None:
        """Write how ``rank`` ended."""
        slot = self._ending_slot(rank)
        word = last_word.encode()[: len(slot) - 1]
        slot[1:] = word.ljust(len(slot) - 1, b"\0")
        slot[0] = _ENDINGS.index(ending)

    def ending(self, rank: int) -> tuple[Ending, str]:
        """Return how ``rank`` ended, and its last word."""
        slot = self._ending_slot(rank)
        return _ENDINGS[slot[0]], _text(slot[1:])

    def _ending_slot(self, rank: int) -> "memoryview[int]":
        return self._memory[rank * _RANK_BYTES + SLOT_BYTES : (rank + 1) * _RANK_BYTES]


def make_places(path: Path, num_ranks: int) -> Places:
    """Write an empty file for ``num_ranks`` local ranks and return what is in it.

    Always a new file: ranks of an earlier start that are about to leave still have the old one in memory.
    """
    path.unlink(missing_ok=True)
    path.write_bytes(bytes(num_ranks * _RANK_BYTES))
    return open_places(path)


def open_places(path: Path) -> Places:
    """Return what is in a file that ``make_places`` wrote, in this process or another."""
    with path.open("r+b") as file:
        return Places(mmap.mmap(file.fileno(), 0))


@dataclass(frozen=True, slots=True)
class Failure:
    """Why ranks have failed, as far as the process that started them knows."""

    sentence: str
    """Who did what where."""
    how: str
    """What happened, in words that are the same where it happens again: ``was killed by SIGKILL``."""
    rank: int | None = None
    """Number among all ranks; None where it cannot be said which one is to blame."""
    phase: str = ""
    """What that rank was doing."""
    is_told: bool = False
    """A rank has already told it by itself, in more words."""

    @property
    def step(self) -> int | None:
        """The step in which it happened, from 1; None where it was not in one."""
        found = _STEP.search(self.phase)
        return None if found is None else int(found[1])


def failure_of(places: Places, layout: Layout, wordless: Mapping[int, str], first_rank: int, num_ranks: int) -> Failure:
    """Return why the ``num_ranks`` ranks from ``first_rank`` on failed, which ran on this server.

    ``wordless``: local ranks that died without a word, with how. Such a rank explains all; else one that has told of a
    fault of its own; else one that said nothing while others waited for it; else what the others said.
    """

    def described(local: int) -> str:
        return layout.describe_rank(first_rank + local)

    if wordless:
        local, how = min(wordless.items())
        phase = places.phase(local)
        sentence = f"{described(local)} {how} during {phase or 'its start'}{_USUAL_CAUSE.get(how, '')}."
        return Failure(sentence, how, first_rank + local, phase)
    endings = {local: places.ending(local) for local in range(num_ranks)}
    told = [local for local, (ending, _) in endings.items() if ending == "told"]
    if told:
        local, how = told[0], endings[told[0]][1]
        phase = places.phase(local)
        sentence = f"{described(local)} failed during {phase or 'its start'}: {how.rstrip('.')}."
        return Failure(sentence, how, first_rank + local, phase, is_told=True)
    lost = [local for local, (ending, _) in endings.items() if ending == "lost"]
    if not lost:
        return Failure("ranks failed without a word.", "failed without a word", is_told=True)
    said, phase = endings[lost[0]][1], places.phase(lost[0])
    silent = [local for local, (ending, _) in endings.items() if ending == "none"]
    if not silent or NO_ANSWER not in said:
        return Failure(f"{said}.", "lost a peer", None, phase)
    stood = [f"{described(local)} stood still in {places.phase(local)}" for local in silent[:_MOST_NAMED]]
    more = f" and {len(silent) - _MOST_NAMED} more" if len(silent) > _MOST_NAMED else ""
    sentence = f"{said}; {', '.join(stood)}{more}."
    return Failure(sentence, "stood still", first_rank + silent[0], places.phase(silent[0]))


def _text(slot: "memoryview[int]") -> str:
    return bytes(slot).rstrip(b"\0").decode(errors="replace")
