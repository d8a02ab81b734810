"""Which bytes does a rank hold, of what, when, and where in the network?

Every storage is written down when it is made, when it grows or shrinks, and when it is let go, with the place where
that was. What it was for is known afterwards: some is marked (weights, optimizer state, gathered copies, gradients,
buffers of collectives), and of the rest, what outlives the action in which it was made waits for a later one
(activations), and what does not was temporary. So nothing hangs on how autograd keeps its tensors.
"""

import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Category = Literal["weights", "compute_copies", "gradients", "optimizer", "activations", "communication", "temporary"]
CATEGORIES: Final[tuple[Category, ...]] = (
    "weights", "compute_copies", "gradients", "optimizer", "activations", "communication", "temporary",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a step: an action of the schedule, or what comes before, between and after."""

    name: str
    is_action: bool


@dataclass(frozen=True, slots=True)
class Moment:
    """The moment of a phase at which the most was held."""

    phase: Phase
    module: str
    """Where in the network that was, empty outside of it; in a backward, the module that it had come to."""
    held: dict[Category, int]
    """Bytes by category."""

    @property
    def peak_bytes(self) -> int:
        """Their sum."""
        return sum(self.held.values())


@dataclass(slots=True)
class _Storage:
    reference: "weakref.ref[torch.UntypedStorage]"
    number: int
    held: int


class Ledger:
    """The storages of a rank, and what became of them."""

    def __init__(self) -> None:
        self._known: dict[int, _Storage] = {}
        self._resized: dict[int, _Storage] = {}
        self._marks: dict[int, Category] = {}
        self._passed: set[int] = set()
        """Storages that a collective has read or written."""
        self._born, self._ended = array("q"), array("q")
        """The phase in which each storage was made and let go, by its number; -1 where it still is."""
        self._phases = [Phase("before the step", is_action=False)]
        self._places: list[tuple[int, str]] = [(0, "")]
        self._at, self._which, self._more = array("q"), array("q"), array("q")
        """Every change: index of the place, number of the storage, bytes."""
        self._bytes = self._peak = 0

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were held at once."""
        return self._peak

    def enter(self, phase: Phase) -> None:
        """Say that ``phase`` begins."""
        self.look()
        self._phases.append(phase)
        self._places.append((len(self._phases) - 1, ""))

    def enter_module(self, name: str) -> None:
        """Say that the module ``name`` is at work."""
        phase, module = self._places[-1]
        if module != name:
            self._places.append((phase, name))

    def add(self, tensor: Tensor, mark: Category | None = None) -> None:
        """Write down the storage of ``tensor``, and what it is for where that is known."""
        known = self._find(tensor)
        if mark is not None:
            self._marks[known.number] = mark

    def add_made(self, tensor: Tensor, given: Iterable[Tensor]) -> None:
        """Write down the storage of ``tensor``, the result of an operation on ``given``, if the operation made it.

        A view of something that was never written down is none of this rank's making: gloo keeps buffers of its own.
        """
        storage = tensor.untyped_storage()
        known = self._known.get(id(storage))
        is_known = known is not None and known.reference() is storage
        if not is_known and all(each.untyped_storage() is not storage for each in given):
            self._find(tensor)

    def add_resized(self, tensor: Tensor, mark: Category) -> None:
        """The same for a storage that torch empties and fills without an operation that could be seen."""
        known = self._find(tensor)
        self._marks[known.number] = mark
        self._resized[known.number] = known
        self._look_at(known)

    def add_filled(self, tensor: Tensor) -> None:
        """Write down that ``tensor`` is written to, which its storage may have grown for: on one rank torch copies
        weights into what it had emptied."""
        known = self._known.get(id(local(tensor).untyped_storage()))
        if known is not None and known.number in self._resized:
            self._look_at(known)

    def add_passed(self, tensor: Tensor) -> None:
        """Write down that a collective reads or writes ``tensor``."""
        self._passed.add(self._find(tensor).number)

    def look(self) -> None:
        """Write down which of the storages that torch empties and fills are empty by now; ``add_resized`` sees the
        filling."""
        for known in self._resized.values():
            if known.held:
                self._look_at(known)

    def _find(self, tensor: Tensor) -> _Storage:
        storage = local(tensor).untyped_storage()
        key = id(storage)
        known = self._known.get(key)
        if known is None or known.reference() is not storage:
            self.look()  # what was let go before this was made must be known to be gone
            number = len(self._born)
            self._born.append(len(self._phases) - 1)
            self._ended.append(-1)
            known = _Storage(weakref.ref(storage, self._drops(key, number)), number, 0)
            self._known[key] = known
            self._change(known, storage.nbytes())
        return known

    def _drops(self, key: int, number: int) -> Callable[[object], None]:
        def drop(_reference: object) -> None:
            known = self._known.get(key)
            if known is not None and known.number == number:
                self._change(known, 0)
                self._ended[number] = len(self._phases) - 1
                del self._known[key]
                self._resized.pop(number, None)

        return drop

    def _look_at(self, known: _Storage) -> None:
        storage = known.reference()
        if storage is not None and storage.nbytes() != known.held:
            self._change(known, storage.nbytes())

    def _change(self, known: _Storage, held: int) -> None:
        more = held - known.held
        known.held = held
        if more:
            self._at.append(len(self._places) - 1)
            self._which.append(known.number)
            self._more.append(more)
            self._bytes += more
            self._peak = max(self._peak, self._bytes)

    def moments(self) -> Iterator[Moment]:
        """Yield for each phase, in order, the moment at which it held the most."""
        held = [0] * len(CATEGORIES)
        category = [CATEGORIES.index(self._category(number)) for number in range(len(self._born))]
        event = 0
        for index, phase in enumerate(self._phases):
            total = most = sum(held)
            at_most, module = list(held), ""
            while event < len(self._at) and self._places[self._at[event]][0] == index:
                more = self._more[event]
                held[category[self._which[event]]] += more
                total += more
                if total > most:
                    most, at_most, module = total, list(held), self._places[self._at[event]][1]
                event += 1
            yield Moment(phase, module, dict(zip(CATEGORIES, at_most, strict=True)))

    def _category(self, number: int) -> Category:
        mark = self._marks.get(number)
        if mark is not None:
            return mark
        born, is_kept = self._phases[self._born[number]], self._born[number] != self._ended[number]
        if number in self._passed and not (born.is_action and is_kept):
            return "communication"
        return "activations" if born.is_action and is_kept else "temporary"


def fullest(moments: Sequence[Moment]) -> Moment:
    """Return the moment at which the most was held, the first of several."""
    return max(moments, key=lambda moment: moment.peak_bytes)


def local(tensor: Tensor) -> Tensor:
    """Return what of ``tensor`` is on this rank."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
