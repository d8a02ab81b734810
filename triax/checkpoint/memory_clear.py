"""How does the memory of a server become free again, of one run's states and of no other's?"""

from pathlib import Path

from triax.checkpoint.memory_folder import is_ours
from triax.checkpoint.retain import owner, remove
from triax.checkpoint.verify import find_checkpoints


def clear(folder: Path, run: str, but: Path | None = None) -> None:
    """Remove what ``run`` keeps in ``folder`` except the state ``but``, and the folder where nothing is left.

    A state that was killed before it said whose it is holds nothing, and goes too. Raises OSError.
    """
    if not is_ours(folder):
        return
    for found in find_checkpoints(folder):
        if found.folder != but and (owner(found.folder) == run or not any(found.folder.iterdir())):
            remove(found.folder)
    if but is None and not any(folder.iterdir()):
        folder.rmdir()
