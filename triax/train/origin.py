"""With which weights does a run begin, and which files go along with it until it is exported?"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from triax.checkpoint.carried import CARRIED_FOLDER, MODEL_FILES, carried_folders, carry, carry_tokenizer
from triax.spec.layout import Layout
from triax.spec.run import Run

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from triax.checkpoint.format import Checkpoint
    from triax.nn.decoder import Decoder


def begin(stages: "Sequence[Decoder]", run: Run, layout: Layout, group: "ProcessGroup | None") -> str | None:
    """Fill the weights of a fresh run: with those of its ``init``, whose digest is returned, else with random ones.

    All ranks of ``group`` call it together. Raises BadInput, on every rank, where ``init`` is no checkpoint that can be
    trusted, or its weights are not those of the run's model; the optimizer's state in it is not read.
    """
    from triax.checkpoint.find import find_verified
    from triax.checkpoint.load import load
    from triax.parallel.place import initialise

    if run.init is None:
        initialise(stages, run.model, run.train.seed, layout)
        return None
    checkpoint = find_verified(Path(run.init), group)
    weights = {name: parameter.detach() for stage in stages for name, parameter in stage.named_parameters()}
    load(checkpoint, weights, group, unread=("optimizer.",))
    return checkpoint.digest


def began_with(checkpoint: "Checkpoint") -> str | None:
    """Return what ``begin`` returned in the run that saved ``checkpoint``."""
    said = checkpoint.manifest.extra.get("init")
    return said if isinstance(said, str) else None


def carry_along(run: Run, folder: Path) -> None:
    """Copy into the folder of ``run`` what a Hugging Face folder needs besides weights: an export then needs no other.

    That is the tokenizer that ``run`` reads with, and what was carried into its ``init``. Torch-free. Raises BadInput
    where a file cannot be copied.
    """
    homes = [] if run.init is None else carried_folders(Path(run.init))[:1]
    if not homes and run.data.tokenizer == "bytes":
        return
    target = folder / CARRIED_FOLDER
    target.mkdir(exist_ok=True)
    for home in homes:
        carry(home, target, MODEL_FILES)
    carry_tokenizer(run.data.tokenizer, target)
