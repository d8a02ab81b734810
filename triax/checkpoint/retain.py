"""Which old checkpoints may go, and how does a folder go without ever looking whole on the way?"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from triax.checkpoint import operations
from triax.checkpoint.disk import read_small, sync_folder, write_atomically, write_unsynced
from triax.checkpoint.format import (
    FORMAT,
    FORMAT_VERSION,
    LATEST,
    MANIFEST,
    MARKER,
    folder_name,
    is_own_file,
    parse_folder_name,
)
from triax.checkpoint.verify import Found, find_checkpoints, read_checkpoint, wrong_sizes
from triax.errors import BadInput


def begin_folder(folder: Path, step: int, run: str) -> Path:
    """Make and return a new folder for a checkpoint of ``step``, marked as written by ``run``.

    Never one that exists: a checkpoint of the same step stays whole beside the new one. Training waits for this, so
    nothing is brought to the disk yet; ``commit`` does that. Raises OSError.
    """
    attempt = 0
    while True:
        made = folder / folder_name(step, attempt)
        try:
            operations.make_folder(made)
            break
        except FileExistsError:
            attempt += 1
    try:
        mark(made, run)
    except OSError:
        # Without its marker nobody would ever remove it.
        with suppress(OSError):
            operations.unlink(made / MARKER)
            operations.remove_folder(made)
        raise
    return made


def mark(folder: Path, run: str) -> None:
    """Say that ``run`` writes a checkpoint into ``folder``. Raises OSError."""
    write_unsynced(folder / MARKER, _json({"run": run}))


def owner(folder: Path) -> str | None:
    """Return the run that wrote this checkpoint folder; None if it has no marker of ours, or is a link to elsewhere."""
    if folder.is_symlink():
        return None
    try:
        marker = json.loads(read_small(folder / MARKER, 4096))
    except (OSError, ValueError, RecursionError, BadInput):
        return None
    if not isinstance(marker, dict) or marker.get("format") != FORMAT:
        return None
    run = marker.get("run")
    return run if isinstance(run, str) else None


def mark_again(folder: Path, run: str) -> None:
    """Mark a folder that ``run`` was killed over while it marked it, where only ``run`` can have made it.

    Its marker is missing or ends early, and it holds nothing but files of this format; any other stays as it is.
    Raises OSError.
    """
    if folder.is_symlink() or not all(is_own_file(path.name) for path in folder.iterdir()):
        return
    try:
        begun = read_small(folder / MARKER, 4096)
    except FileNotFoundError:
        begun = b""
    except (OSError, BadInput):
        return
    whole = _json({"run": run})
    if begun != whole and whole.startswith(begun):
        operations.unlink(folder / MARKER)
        mark(folder, run)


def remove(folder: Path) -> None:
    """Remove what this format wrote in a checkpoint folder, and the folder unless it holds something else.

    The manifest goes first, so that no crash leaves a folder that looks whole; the marker last, so that what is left
    is still known to be ours. A folder without marker goes only if it is empty. Raises OSError.
    """
    if owner(folder) is None:
        operations.remove_folder(folder)
        return
    operations.unlink(folder / MANIFEST)
    sync_folder(folder)
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        if is_own_file(name) and name != MARKER:
            operations.unlink(folder / name)
    if all(is_own_file(name) for name in names):
        sync_folder(folder)
        operations.unlink(folder / MARKER)
        operations.remove_folder(folder)
        sync_folder(folder.parent)


def unfinished(folder: Path, run: str) -> list[Path]:
    """Return what saves of ``run`` that were interrupted have left in ``folder``.

    A folder without a marker was interrupted before it held anything, or is not ours; only an empty one is among them.
    Raises OSError, and BadInput where the folder cannot be listed.
    """
    return [
        found.folder
        for found in find_checkpoints(folder)
        if not found.is_complete
        and (owner(found.folder) == run or (not found.folder.is_symlink() and not any(found.folder.iterdir())))
    ]


def remove_unfinished(folder: Path, run: str) -> None:
    """Remove what is ``unfinished``. Raises OSError."""
    for path in unfinished(folder, run):
        remove(path)


def point_latest(folder: Path, name: str) -> None:
    """Make ``latest`` in ``folder`` name this checkpoint. Raises OSError."""
    write_atomically(folder / LATEST, _json({"checkpoint": name}))


def outdated(folder: Path, run: str, keep: int, newest: Path) -> list[Path]:
    """Return the checkpoints of ``run`` that are older than its ``keep`` newest steps.

    ``newest`` always stays. Later steps than its own belong to a history that the run has left, or could not be read
    when it resumed: they do not count, and stay for a person to judge. A checkpoint counts if its manifest can be
    trusted and its files have their sizes; a damaged one goes once it is older than those that count. Of one step only
    the last attempt stays.
    """
    current = parse_folder_name(newest.name)
    assert current is not None
    goes = []
    kept_steps = [current[0]]
    for one in find_checkpoints(folder):
        if (one.step, one.attempt) >= current or not one.is_complete or owner(one.folder) != run:
            continue
        if one.step not in kept_steps and len(kept_steps) < keep:
            if _looks_whole(one):
                kept_steps.append(one.step)
            continue
        goes.append(one.folder)
    return goes


def prune(folder: Path, run: str, keep: int, newest: Path) -> list[Path]:
    """Remove and return what is ``outdated`` now that ``newest`` was written. Raises OSError."""
    goes = outdated(folder, run, keep, newest)
    for path in goes:
        remove(path)
    return goes


def remove_after(folder: Path, run: str, step: int) -> list[Path]:
    """Remove and return the checkpoints of ``run`` later than ``step``: the run has gone back and takes another way.

    Without this a restart would take up the history that was left. Raises OSError.
    """
    found = find_checkpoints(folder)
    removed = [one.folder for one in found if one.step > step and owner(one.folder) == run]
    for path in removed:
        remove(path)
    left = [one.folder.name for one in found if one.is_complete and one.folder not in removed]
    if removed and left:
        point_latest(folder, left[0])
    return removed


def _looks_whole(found: Found) -> bool:
    try:
        return not wrong_sizes(read_checkpoint(found.folder))
    except BadInput:
        return False


def _json(fields: dict[str, Any]) -> bytes:
    return (json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, **fields}) + "\n").encode()
