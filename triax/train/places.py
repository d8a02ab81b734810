"""Where does every local rank stand, and how did it end? Known to the process that started it, also of a killed rank.

A file that all of them have in memory, one slot for each rank: the phase that ``triax.parallel.progress`` writes there
at every action, and the rank's last word. Torch-free.
"""

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from triax.spec.layout import Layout

_PHASE_BYTES: Final = 192
"""The first part of a slot."""

_SLOT_BYTES: Final = 1024

Ending = Literal["none", "told", "lost"]
"""none: the rank ended well, was killed or still runs. told: it has told by itself why it failed. lost: it failed only
because a peer had gone or did not answer, which its last word says."""

NO_ANSWER: Final = "had no answer from a peer"
"""What a rank says that waited in vain."""

_USUAL_CAUSE: Final = {
    "was killed by SIGABRT": " (so a collective ends whose sizes differ between ranks)",
    "was killed by SIGKILL": " (so a system ends a process that takes its last memory)",
}
_MOST_NAMED: Final = 3

_ENDINGS: Final[tuple[Ending, ...]] = ("none", "told", "lost")


class Places:
    """The slots of all local ranks."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memoryview(memory)

    def phase_slot(self, rank: int) -> "memoryview[int]":
        """Return the bytes that ``rank`` writes its phase into."""
        start = rank * _SLOT_BYTES
        return self._memory[start : start + _PHASE_BYTES]

    def phase(self, rank: int) -> str:
        """Return the phase in which ``rank`` was last."""
        return _text(self.phase_slot(rank))

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
        return self._memory[rank * _SLOT_BYTES + _PHASE_BYTES : (rank + 1) * _SLOT_BYTES]


def make_places(path: Path, num_ranks: int) -> Places:
    """Write a file of empty slots for ``num_ranks`` local ranks and return them."""
    path.write_bytes(bytes(num_ranks * _SLOT_BYTES))
    return open_places(path)


def open_places(path: Path) -> Places:
    """Return the slots in a file that ``make_places`` wrote, in this process or another."""
    with path.open("r+b") as file:
        return Places(mmap.mmap(file.fileno(), 0))


def explanation(places: Places, layout: Layout, wordless: Mapping[int, str]) -> str:
    """Return in one sentence why local ranks failed; empty where one of them has told it by itself.

    ``wordless``: ranks that died without a word, with how. Such a rank explains all; else one that said nothing while
    others waited for it; else what the others said.
    """
    ranks = range(layout.world_size)
    if wordless:
        rank, how = min(wordless.items())
        return f"{layout.describe_rank(rank)} {how} during {places.phase(rank)}{_USUAL_CAUSE.get(how, '')}."
    endings = {rank: places.ending(rank) for rank in ranks}
    if any(ending == "told" for ending, _ in endings.values()):
        return ""
    said = [last_word for ending, last_word in endings.values() if ending == "lost"]
    if not said:
        return ""
    silent = [
        f"{layout.describe_rank(rank)} stood still in {places.phase(rank)}"
        for rank in ranks
        if endings[rank][0] == "none"
    ]
    if not silent or NO_ANSWER not in said[0]:
        return f"{said[0]}."
    more = f" and {len(silent) - _MOST_NAMED} more" if len(silent) > _MOST_NAMED else ""
    return f"{said[0]}; {', '.join(silent[:_MOST_NAMED])}{more}."


def _text(slot: "memoryview[int]") -> str:
    return bytes(slot).rstrip(b"\0").decode(errors="replace")
