"""What is the state of a run besides its tensors, and how do both go to disk and come back?

All of it is said in global numbers: no rank, no iterator and no random state is part of it, so any layout can go on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from triax.checkpoint.format import Checkpoint
from triax.checkpoint.load import load
from triax.checkpoint.verify import newest_verified
from triax.errors import BadInput
from triax.nn.decoder import Decoder
from triax.spec.plan import Plan
from triax.train.optimizer import Optimizer
from triax.train.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where a run stands after ``step`` steps."""

    step: int = 0
    """Updates made or skipped."""
    tokens: int = 0
    """Tokens that went through the network."""
    next_sample: int = 0
    """Number of the first sample of the coming step."""


def tensors_of(stages: Sequence[Decoder], optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the live weights and optimizer state under their names in checkpoints.

    Where a rank has a tied embedding twice, its first copy: ``Optimizer.copy_tied`` makes the second one from it.
    """
    weights: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            weights.setdefault(name, parameter.detach())
    return weights | optimizer.state_tensors()


def extra_of(state: TrainState, plan: Plan, data_fingerprint: str) -> dict[str, Any]:
    """Return what stands in the manifest beside the tensors."""
    return {
        "step": state.step,
        "state": asdict(state),
        "fingerprint": plan.fingerprint,
        "data_fingerprint": data_fingerprint,
        "layout": plan.layout.model_dump(mode="json"),
        "model": plan.run.model.model_dump(mode="json"),
        "tokenizer": plan.run.data.tokenizer,
        "seq_len": plan.run.data.seq_len,
        "versions": {"torch": torch.__version__},
    }


def restore(
    folder: RunFolder, plan: Plan, data_fingerprint: str, tensors: Mapping[str, Tensor], group: ProcessGroup | None
) -> tuple[TrainState, Checkpoint | None, list[str]]:
    """Fill ``tensors`` from the newest checkpoint that verifies; return the state, it, and why newer ones were not.

    Raises BadInput where the checkpoint is of another run or of other data; ``tensors`` are untouched then. Without any
    checkpoint, the state is that of a fresh run.
    """
    checkpoint, passed_over = newest_verified(folder.checkpoints, group)
    if checkpoint is None:
        if passed_over:
            raise BadInput(
                f"{folder.checkpoints} holds no checkpoint that can be trusted: {'; '.join(passed_over)}. Remove the "
                f"folder to start anew."
            )
        return TrainState(), None, []
    extra = checkpoint.manifest.extra
    for key, now, what in (
        ("fingerprint", plan.fingerprint, "of another run"),
        ("data_fingerprint", data_fingerprint, "of a run on other data"),
    ):
        if extra.get(key) != now:
            raise BadInput(
                f"{checkpoint.folder} is {what} ({key} {extra.get(key)}, and this run's is {now}): give another "
                f"--run-dir to start anew."
            )
    load(checkpoint, tensors, group)
    return _state_from(extra.get("state"), checkpoint), checkpoint, passed_over


def _state_from(said: Any, checkpoint: Checkpoint) -> TrainState:
    names = TrainState.__dataclass_fields__.keys()
    if not isinstance(said, dict) or said.keys() != names or not all(type(said[n]) is int for n in names):
        raise BadInput(f"{checkpoint.folder}: the manifest does not say where the run stood; it cannot be resumed.")
    return TrainState(**said)
