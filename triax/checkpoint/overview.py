"""What does a folder of checkpoints hold, at a glance? Manifests and sizes are looked at, contents are not read."""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from triax.checkpoint.format import MANIFEST, Manifest
from triax.checkpoint.retain import owner
from triax.checkpoint.verify import Found, find_checkpoints, read_checkpoint, wrong_sizes
from triax.errors import BadInput
from triax.spec.layout import Layout


@dataclass(frozen=True, slots=True)
class Glance:
    """One checkpoint as its manifest and the sizes of its files show it."""

    name: str
    step: int
    bytes: int
    """Of its files, as they lie on the disk."""
    layout: str
    """In which it was saved; empty where the manifest does not say."""
    run: str | None
    """Which run may remove it; None where nobody may."""
    age_s: float | None
    """Since its manifest was written; None where there is none."""
    problem: str
    """Why nobody should go on from it; empty where nothing shows."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong with it by sizes; ``verified`` reads every byte."""
        return not self.problem


def overview(folder: Path) -> list[Glance]:
    """Return what each checkpoint in ``folder`` is, newest first. Raises BadInput if the folder cannot be listed."""
    return [_glance(found) for found in find_checkpoints(folder)]


def _glance(found: Found) -> Glance:
    manifest: Manifest | None = None
    problem = ""
    if not found.is_complete:
        problem = "not finished"
    else:
        try:
            checkpoint = read_checkpoint(found.folder)
            manifest = checkpoint.manifest
            if wrong := wrong_sizes(checkpoint):
                problem = f"damaged: {'; '.join(wrong)}"
        except BadInput as error:
            problem = f"damaged: {error}"
    return Glance(
        name=found.folder.name,
        step=found.step,
        bytes=_bytes_in(found.folder),
        layout=_layout_of(manifest),
        run=owner(found.folder),
        age_s=_age_s(found.folder / MANIFEST),
        problem=problem,
    )


def _layout_of(manifest: Manifest | None) -> str:
    try:
        return "" if manifest is None else Layout.model_validate(manifest.extra.get("layout")).describe()
    except ValidationError:
        return ""


def _bytes_in(folder: Path) -> int:
    total = 0
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                total += path.lstat().st_size if path.is_file() else 0
    return total


def _age_s(path: Path) -> float | None:
    try:
        return max(time.time() - path.stat().st_mtime, 0.0)
    except OSError:
        return None
