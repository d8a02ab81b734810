"""Which checkpoints does a folder hold, and which of them is the newest that can be trusted?"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import ProcessGroup

from triax.checkpoint.agree import Ranks
from triax.checkpoint.disk import read_small, sentence, what_is_wrong
from triax.checkpoint.format import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Checkpoint,
    parse_folder_name,
    read_manifest,
)
from triax.errors import BadInput


@dataclass(frozen=True, order=True)
class Found:
    """A folder with a checkpoint's name. ``attempt`` counts saves of one step; a later one replaces an earlier one."""

    step: int
    attempt: int
    folder: Path
    is_complete: bool
    """Whether a manifest is there; what it says has not been read."""


def find_checkpoints(folder: Path) -> list[Found]:
    """Return the checkpoint folders in ``folder``, newest first; none where there is no such folder.

    Raises BadInput if the folder is there and cannot be listed.
    """
    try:
        entries = [(name, path) for path in folder.iterdir() if (name := parse_folder_name(path.name))]
        found = [Found(step, attempt, path, _has_manifest(path)) for (step, attempt), path in entries if path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"the checkpoints in {folder} cannot be listed: {sentence(error)}.") from None
    return sorted(found, reverse=True)


def _has_manifest(folder: Path) -> bool:
    try:
        return (folder / MANIFEST).exists()
    except OSError:
        return True  # one folder that cannot be looked into hides no other; who reads the manifest will say why


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in ``folder`` by its manifest; its files are not read.

    Raises BadInput where there is no manifest that can be read and trusted.
    """
    try:
        data = read_small(folder / MANIFEST, MAX_MANIFEST_BYTES)
        return Checkpoint(folder, read_manifest(data), hashlib.sha256(data).hexdigest())
    except FileNotFoundError:
        raise BadInput(f"{folder} holds no finished checkpoint: it has no {MANIFEST}.") from None
    except OSError as error:
        raise BadInput(f"{folder / MANIFEST} cannot be read: {sentence(error)}.") from None
    except BadInput as error:
        raise BadInput(f"{folder} cannot be used: {error}") from None


def wrong_sizes(checkpoint: Checkpoint) -> list[str]:
    """Return which of its files are missing or have another size than the manifest says; contents are not read."""
    wrong = []
    for file in checkpoint.manifest.files:
        try:
            found = (checkpoint.folder / file.name).stat().st_size
        except OSError as error:
            wrong.append(f"{file.name} cannot be read: {sentence(error)}")
        else:
            wrong += [f"{file.name} has {found} bytes instead of {file.bytes}"] if found != file.bytes else []
    return wrong


def verified(folder: Path, group: ProcessGroup | None = None) -> Checkpoint:
    """Return the checkpoint in ``folder`` once every byte of its files was read and found as it was written.

    The ranks of ``group`` share the files between them and agree: all return, or all raise BadInput with what is wrong.
    """
    ranks = Ranks.of(group)
    checkpoint: Checkpoint | None = None
    problems = []
    try:
        checkpoint = read_checkpoint(folder)
    except BadInput as error:
        problems.append(str(error))
    if problems := ranks.union(problems):
        raise BadInput(problems[0])
    assert checkpoint is not None
    if len(ranks.union([checkpoint.digest])) > 1:
        raise BadInput(f"ranks read different manifests in {folder}: it must be one folder that all servers share.")
    # Largest first, in turns: about even, and the same on every rank.
    files = sorted(checkpoint.manifest.files, key=lambda file: (-file.bytes, file.name))
    for file in files[ranks.rank :: ranks.size]:
        if wrong := what_is_wrong(folder / file.name, file.bytes, file.sha256):
            problems.append(f"{file.name} {wrong}")
    if problems := ranks.union(problems):
        raise BadInput(f"{folder} is damaged: {'; '.join(sorted(problems))}.")
    return checkpoint


def newest_verified(
    folder: Path, group: ProcessGroup | None = None, at_most: int | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint in ``folder`` that ``verified`` vouches for, and why newer ones were passed over.

    ``at_most``: the latest step that it may be of; later ones are as if they were not there.

    None where there is none, with the reason for each that is damaged. A save that was interrupted left no checkpoint:
    it is named among the reasons if there is an older checkpoint, but does not by itself make an empty folder suspect.
    The same on every rank of ``group``. Raises BadInput if the folder cannot be listed.
    """
    ranks = Ranks.of(group)
    passed_over, damaged = [], []
    for name, is_complete in _candidates(folder, ranks, at_most):
        if not is_complete:
            passed_over.append(f"{folder / name} is not finished: the save that wrote it was interrupted.")
            continue
        try:
            return verified(folder / name, group), passed_over
        except BadInput as error:
            passed_over.append(str(error))
            damaged.append(str(error))
    return None, damaged


def newest_step(folder: Path, group: ProcessGroup | None = None) -> int:
    """Return the step of the newest checkpoint in ``folder`` by its name, whether or not it can be trusted; else 0.

    The same on every rank of ``group``. Raises BadInput if the folder cannot be listed.
    """
    names = [name for name, is_complete in _candidates(folder, Ranks.of(group), at_most=None) if is_complete]
    return max((step for name in names if (parsed := parse_folder_name(name)) for step in parsed[:1]), default=0)


def _candidates(folder: Path, ranks: Ranks, at_most: int | None) -> list[tuple[str, bool]]:
    """Return names of checkpoint folders, newest first, and whether each is complete, as rank 0 sees them."""
    problems: list[str] = []
    found: list[Found] = []
    if ranks.rank == 0:
        try:
            found = find_checkpoints(folder)
        except BadInput as error:
            problems.append(str(error))
    if problems := ranks.union(problems):
        raise BadInput(problems[0])
    seen = ranks.broadcast(
        [(one.folder.name, one.is_complete) for one in found if at_most is None or one.step <= at_most]
    )
    return [(name, is_complete) for name, is_complete in seen]
