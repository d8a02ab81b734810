"""When do the parts of all ranks make a checkpoint, and how does it become one at a single moment?

Ranks do not talk here: this runs on a thread, and collectives belong to training. Each rank leaves a small part file in
the folder when its shard is on the disk; rank 0 waits for all of them and writes the manifest.
"""

import errno
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy
import safetensors
import torch

from triax import __version__
from triax.checkpoint import operations
from triax.checkpoint.disk import Cancelled, read_small, sentence, sync_file, sync_folder, write_atomically
from triax.checkpoint.format import (
    MANIFEST,
    MARKER,
    FileEntry,
    Manifest,
    TensorEntry,
    part_name,
    write_manifest,
)
from triax.checkpoint.retain import point_latest, prune
from triax.errors import BadInput

_LONGEST_WAIT_S: Final = 0.25


class NeverAppeared(Exception):
    """Rank 0 does not see what other ranks say they have written."""


@dataclass(frozen=True)
class Ticket:
    """One save: where it goes and how the parts of this save are told from those of an interrupted one."""

    step: int
    folder: Path
    token: str


def deliver(ticket: Ticket, rank: int, file: FileEntry) -> None:
    """Tell rank 0 that this rank's shard is on the disk. Raises OSError."""
    text = json.dumps({"token": ticket.token, "file": file.model_dump()})
    write_atomically(ticket.folder / part_name(rank), text.encode())


def collect(
    ticket: Ticket, writers: Sequence[int], is_cancelled: Callable[[], bool], is_overdue: Callable[[], bool]
) -> list[FileEntry]:
    """Return what each of the writing ranks has delivered, once all have. Raises Cancelled, or NeverAppeared."""
    files: dict[int, FileEntry] = {}
    wait_s = 0.002
    while missing := [rank for rank in writers if rank not in files]:
        for rank in missing:
            if file := _delivered(ticket, rank):
                files[rank] = file
        if len(files) == len(writers):
            break
        if is_cancelled():
            raise Cancelled
        if is_overdue():
            late = ", ".join(str(rank) for rank in missing[:8])
            raise NeverAppeared(
                f"what ranks {late} wrote never appeared in {ticket.folder}: all servers must share this folder"
            )
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    return [files[rank] for rank in writers]


def _delivered(ticket: Ticket, rank: int) -> FileEntry | None:
    try:
        part = json.loads(read_small(ticket.folder / part_name(rank), 4096))
        file = FileEntry.model_validate(part["file"])
        is_there = part["token"] == ticket.token and (ticket.folder / file.name).stat().st_size == file.bytes
    except (OSError, ValueError, KeyError, TypeError, BadInput):
        return None  # not yet, or not all of it: a network file system may show names before contents
    return file if is_there else None


def manifest_of(
    step: int, run: str, extra: dict[str, Any], tensors: dict[str, TensorEntry], files: Sequence[FileEntry]
) -> bytes:
    """Return the manifest of a state as it is written. Raises BadInput where it is too long to be read again."""
    return write_manifest(
        Manifest(
            step=step,
            run=run,
            extra=extra,
            versions={
                "triax": __version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "safetensors": safetensors.__version__,
                "numpy": numpy.__version__,
            },
            files=tuple(files),
            tensors=tensors,
        )
    )


def commit(
    ticket: Ticket, run: str, extra: dict[str, Any], tensors: dict[str, TensorEntry], files: Sequence[FileEntry],
    permit: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Write the manifest: with its last rename the folder is a checkpoint. Raises OSError, and what ``permit`` does."""
    text = manifest_of(ticket.step, run, extra, tensors, files)
    # What the manifest counts on is on the disk before it. Shards and their names were brought there by their writers.
    sync_file(ticket.folder / MARKER)
    sync_folder(ticket.folder.parent)
    permit()
    write_atomically(ticket.folder / MANIFEST, text)
    # Older checkpoints may go after this. A network file system that loses a rename must not cost all of them.
    if read_small(ticket.folder / MANIFEST, len(text)) != text:
        raise OSError(errno.EIO, "it does not hold what was written", str(ticket.folder / MANIFEST))


def tidy(ticket: Ticket, run: str, keep: int, delivered: Sequence[int]) -> list[str]:
    """Do what is left after a commit, each whether or not the others can be done; return what could not be."""

    def remove_parts() -> None:
        for rank in delivered:
            operations.unlink(ticket.folder / part_name(rank))

    problems = []
    for what, do in (
        ("its part files could not be removed", remove_parts),
        ("`latest` could not be written", lambda: point_latest(ticket.folder.parent, ticket.folder.name)),
        ("older checkpoints could not be removed", lambda: prune(ticket.folder.parent, run, keep, ticket.folder)),
    ):
        try:
            do()
        except OSError as error:
            problems.append(f"{what}: {sentence(error)}")
        except Exception as error:  # the checkpoint is whole, and nothing that fails here may say otherwise
            problems.append(f"{what}: {error}")
    return problems
