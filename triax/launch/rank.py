"""Was this process started as a rank of several, and do torchrun's variables say which?

Asked before torch is loaded, so that a nonsense is told at once and in a sentence.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Final

from triax.errors import BadInput

_OF_PROCESS: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_HOW: Final = "start ranks with torchrun, srun or mpirun, or unset RANK"


@dataclass(frozen=True, slots=True)
class Rank:
    """Who this process is among those that a launcher started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def num_servers(self) -> int:
        """Servers of equal size that the ranks run on."""
        return self.world_size // self.local_world_size


def rank_of_process(environment: Mapping[str, str]) -> Rank | None:
    """Return who torchrun's variables say this process is; None where RANK is not set: nobody started it as one.

    LOCAL_RANK and LOCAL_WORLD_SIZE may be absent: all ranks are of one server then. Raises BadInput where a variable is
    missing or no number, and where they contradict each other.
    """
    if "RANK" not in environment:
        return None
    rank, world_size = _number("RANK", environment), _number("WORLD_SIZE", environment)
    local_rank = _number("LOCAL_RANK", environment, rank)
    local_world_size = _number("LOCAL_WORLD_SIZE", environment, world_size)
    said = f"RANK={rank} WORLD_SIZE={world_size} LOCAL_RANK={local_rank} LOCAL_WORLD_SIZE={local_world_size}"
    if not (rank < world_size and local_rank < local_world_size <= world_size):
        raise BadInput(f"the environment puts this rank outside the world: {said}; {_HOW}.")
    if world_size % local_world_size:
        raise BadInput(f"ranks must be equally many on each server, and the environment says {said}.")
    if "MASTER_ADDR" not in environment:
        raise BadInput(f"RANK is set and MASTER_ADDR, where the ranks meet, is not: {_HOW}.")
    _number("MASTER_PORT", environment, below=1 << 16)
    return Rank(rank, world_size, local_rank, local_world_size)


def forget_leftovers(environment: MutableMapping[str, str]) -> None:
    """Remove what another launcher left in the environment of a process that is no rank of it."""
    for name in _OF_PROCESS:
        environment.pop(name, None)


def _number(name: str, environment: Mapping[str, str], default: int | None = None, below: int = 1 << 31) -> int:
    said = environment.get(name)
    if said is None:
        if default is not None:
            return default
        raise BadInput(f"RANK is set and {name} is not: {_HOW}.")
    if not (said.isascii() and said.isdecimal() and len(said) <= 18 and int(said) < below):
        raise BadInput(f"{name}={said[:80]!r} is no number from 0 to {below - 1}: {_HOW}.")
    return int(said)
