"""Which checkpoint does a path mean, and which network is it of?"""

import os
from pathlib import Path

from pydantic import ValidationError
from torch.distributed import ProcessGroup

from triax.checkpoint.agree import Ranks
from triax.checkpoint.format import Checkpoint
from triax.checkpoint.verify import newest_verified, verified
from triax.errors import BadInput
from triax.spec.model import ModelSpec


def find_verified(path: Path, group: ProcessGroup | None = None) -> Checkpoint:
    """Return the checkpoint at ``path``, or the newest one where it is the folder of a run; every byte was checked.

    The ranks of ``group`` share the reading between them and agree. Raises BadInput where there is none to trust.
    """
    folder = path / "checkpoints"
    ranks = Ranks.of(group)
    is_no_folder, is_of_run = ranks.maxima(not os.path.isdir(path), os.path.isdir(folder))
    if is_no_folder:
        raise BadInput(f"{path} is no folder: give a run's folder, such as runs/NAME, or one of its checkpoints.")
    if not is_of_run:
        return verified(path, group)
    checkpoint, passed_over = newest_verified(folder, group)
    if checkpoint is None:
        raise BadInput(f"{folder} holds no saved state that can be trusted. {' '.join(passed_over)}")
    return checkpoint


def model_of(checkpoint: Checkpoint) -> ModelSpec:
    """Return the network that the manifest says; raise BadInput where it says none."""
    try:
        return ModelSpec.model_validate(checkpoint.manifest.extra.get("model"))
    except ValidationError:
        raise BadInput(f"{checkpoint.folder} does not say which model it is of: it was not saved by a run.") from None
