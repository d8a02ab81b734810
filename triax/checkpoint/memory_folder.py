"""Where does a server keep states in its memory, so that they outlive every process of the run? Torch-free."""

import hashlib
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from triax.checkpoint.disk import free_bytes
from triax.errors import BadInput

PLACE: Final = "TRIAX_MEMORY_DIR"
"""Names another place than shared memory, such as a disk of the server's own."""
_SHARED_MEMORY: Final = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Servers:
    """How the ranks of a run lie on servers: blocks of equal size, in the order of ranks."""

    world_size: int
    local_world_size: int

    @property
    def number(self) -> int:
        """How many there are."""
        return self.world_size // self.local_world_size

    def of(self, rank: int) -> int:
        """Return the server of a rank."""
        return rank // self.local_world_size

    def first_rank(self, server: int) -> int:
        """Return the rank that speaks for a server."""
        return server * self.local_world_size

    def neighbour(self, rank: int, distance: int) -> int:
        """Return the rank in the same place of another server; the last server is followed by the first."""
        return (rank + distance * self.local_world_size) % self.world_size


def memory_folder(checkpoints: Path, run: str) -> Path:
    """Return where this server keeps states of the run whose disk checkpoints are in ``checkpoints``."""
    place = hashlib.sha256(str(checkpoints.resolve()).encode()).hexdigest()[:16]
    return Path(os.environ.get(PLACE, _SHARED_MEMORY)) / f"triax-{run}-{place}"


def open_folder(folder: Path) -> None:
    """Make the folder, or see that it is ours alone: nobody else may read weights or plant some.

    Raises BadInput where it is another's, OSError where it cannot be made.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise BadInput(f"{folder} is not a folder of this user alone: states in memory are not kept.")


def is_ours(folder: Path) -> bool:
    """Return whether there is such a folder, of this user alone."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def room_bytes(folder: Path) -> int:
    """Return how many bytes can be kept in ``folder``: as its file system and the server's free memory allow.

    A tenth of the free memory is left to others. Raises OSError.
    """
    room = free_bytes(folder)
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                room = min(room, int(line.split()[1]) * 1024 * 9 // 10)
    return room
