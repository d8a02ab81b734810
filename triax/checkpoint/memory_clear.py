"""How does the memory of a server become free again, of one run's states and of no other's?"""

from pathlib import Path

from triax.checkpoint.memory_folder import is_ours
from triax.checkpoint.retain import mark_again, owner, remove
from triax.checkpoint.verify import find_checkpoints


def clear(folder: Path, run: str, but: Path | None = None) -> None:
    """Remove what ``run`` keeps in ``folder`` except the state ``but``, and the folder where nothing is left.

    A state that was killed before it had said whose it is goes too: the folder is that of ``run``. Raises OSError.
    """
    if not is_ours(folder):
        return
    for found in find_checkpoints(folder):
        if found.folder == but:
            continue
        mark_again(found.folder, run)
        if owner(found.folder) == run:
            remove(found.folder)
    if but is None and not any(folder.iterdir()):
        folder.rmdir()
