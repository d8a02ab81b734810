"""Which checkpoint does a path mean, and which network is it of?"""

from pathlib import Path

from pydantic import ValidationError

from triax.checkpoint.format import Checkpoint
from triax.checkpoint.verify import newest_verified, verified
from triax.errors import BadInput
from triax.spec.model import ModelSpec


def find_verified(path: Path) -> Checkpoint:
    """Return the checkpoint at ``path``, or the newest one where it is the folder of a run; every byte was checked.

    Raises BadInput where there is none that can be trusted.
    """
    if not path.is_dir():
        raise BadInput(f"{path} is no folder: give a run's folder, such as runs/NAME, or one of its checkpoints.")
    folder = path / "checkpoints"
    if not folder.is_dir():
        return verified(path)
    checkpoint, passed_over = newest_verified(folder)
    if checkpoint is None:
        raise BadInput(f"{folder} holds no saved state that can be trusted. {' '.join(passed_over)}")
    return checkpoint


def model_of(checkpoint: Checkpoint) -> ModelSpec:
    """Return the network that the manifest says; raise BadInput where it says none."""
    try:
        return ModelSpec.model_validate(checkpoint.manifest.extra.get("model"))
    except ValidationError:
        raise BadInput(f"{checkpoint.folder} does not say which model it is of: it was not saved by a run.") from None
