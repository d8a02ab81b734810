"""What is the state of a run besides its tensors, and how do both go to disk and come back?

All of it is said in global numbers: no rank, no iterator and no random state is part of it, so any layout can go on.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.distributed import ProcessGroup

from triax.checkpoint.format import Checkpoint
from triax.checkpoint.load import load
from triax.checkpoint.verify import newest_step, newest_verified
from triax.errors import BadInput
from triax.nn.decoder import Decoder
from triax.spec.plan import Plan
from triax.spec.run import Run
from triax.train.guard import GuardState, Samples
from triax.train.optimizer import Optimizer
from triax.train.run_folder import RunFolder, another_run

FindInMemory = Callable[[int, Mapping[str, Tensor]], tuple[Checkpoint | None, list[str]]]
"""Returns the newest state in memory of a step or later, and why newer ones were passed over."""


def nothing_in_memory(_least_step: int, _tensors: Mapping[str, Tensor]) -> tuple[Checkpoint | None, list[str]]:
    """Return that no state is kept in memory."""
    return None, []


_ALWAYS_SAID: Final = {"step", "tokens", "next_sample"}
"""What the first checkpoints of this format say already; the rest is then as in a fresh run."""


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where a run stands after ``step`` steps."""

    step: int = 0
    """Updates made or skipped."""
    tokens: int = 0
    """Tokens that went through the network."""
    next_sample: int = 0
    """Number of the first sample of the coming step."""
    skipped: tuple[Samples, ...] = ()
    """Samples that the run passes over, ascending; each a whole number of steps."""
    rate_factor: float = 1.0
    """What the learning rate of the run file is multiplied by."""
    guard: GuardState = field(default_factory=GuardState)

    def after_step(self, run: Run) -> Self:
        """Return the state after one more step."""
        return replace(
            self,
            step=self.step + 1,
            tokens=self.tokens + run.tokens_per_step,
            next_sample=self._beyond_skipped(self.next_sample + run.sequences_per_step),
        )

    def passing_over(self, samples: Samples) -> Self:
        """Return the state of a run that passes over ``samples`` too, from where it stands."""
        passing = replace(self, skipped=_joined((*self.skipped, samples)))
        return replace(passing, next_sample=passing._beyond_skipped(self.next_sample))

    def reading_again(self, samples: Samples) -> Self:
        """Return the state of a run that does not pass over ``samples``, which it came to last."""
        first, stop = samples
        parts = [part for a, b in self.skipped for part in ((a, min(b, first)), (max(a, stop), b)) if part[0] < part[1]]
        return replace(self, skipped=tuple(parts))

    def _beyond_skipped(self, sample: int) -> int:
        for first, stop in self.skipped:
            if first <= sample < stop:
                sample = stop
        return sample


def _joined(ranges: tuple[Samples, ...]) -> tuple[Samples, ...]:
    joined: list[Samples] = []
    for first, stop in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((first, stop))
    return tuple(joined)


_STATE: Final = TypeAdapter(TrainState)
"""How a state is written into a manifest and read from one."""


def tensors_of(stages: Sequence[Decoder], optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the live weights and optimizer state under their names in checkpoints.

    Where a rank has a tied embedding twice, its first copy: ``Optimizer.copy_tied`` makes the second one from it.
    """
    weights: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            weights.setdefault(name, parameter.detach())
    return weights | optimizer.state_tensors()


def extra_of(state: TrainState, plan: Plan, data_fingerprint: str, began_as: str | None) -> dict[str, Any]:
    """Return what stands in the manifest beside the tensors; ``began_as`` as in ``Saver``."""
    return {
        "step": state.step,
        "state": _STATE.dump_python(state, mode="json"),
        "fingerprint": plan.fingerprint,
        "mathematics": plan.run.mathematics(),
        "data_fingerprint": data_fingerprint,
        "init": began_as,
        "layout": plan.layout.model_dump(mode="json"),
        "model": plan.run.model.model_dump(mode="json"),
        "tokenizer": plan.run.data.tokenizer,
        "seq_len": plan.run.data.seq_len,
        "versions": {"torch": torch.__version__},
    }


def restore(
    folder: RunFolder, plan: Plan, data_fingerprint: str, tensors: Mapping[str, Tensor], group: ProcessGroup | None,
    in_memory: FindInMemory = nothing_in_memory, at_most: int | None = None,
) -> tuple[TrainState, Checkpoint | None, list[str]]:  # fmt: skip
    """Fill ``tensors`` from the newest checkpoint that verifies; return the state, it, and why newer ones were not.

    ``in_memory`` is asked before the disk is read; ``at_most`` is the latest step that a checkpoint on disk may be of.
    Raises BadInput where the checkpoint is of another run or of other data; ``tensors`` are untouched then. Without any
    checkpoint, the state is that of a fresh run.
    """
    checkpoint, passed_over = in_memory(newest_step(folder.checkpoints, group), tensors)
    if checkpoint is None:
        checkpoint, refused = newest_verified(folder.checkpoints, group, at_most)
        passed_over += refused
        if refused:
            # Less could be trusted than the disk has names for: memory may have what lies between.
            least_step = 0 if checkpoint is None else checkpoint.manifest.step + 1
            between, refused_too = in_memory(least_step, tensors)
            checkpoint, passed_over = between or checkpoint, passed_over + refused_too
        if checkpoint is None and refused:
            raise BadInput(
                f"{folder.checkpoints} holds no checkpoint that can be trusted. {' '.join(passed_over)} Give "
                f"another --run-dir to start anew."
            )
    if checkpoint is None:
        return TrainState(), None, passed_over
    _refuse_another_run(checkpoint, plan, data_fingerprint)
    load(checkpoint, tensors, group)
    return _state_from(checkpoint), checkpoint, passed_over


def _refuse_another_run(checkpoint: Checkpoint, plan: Plan, data_fingerprint: str) -> None:
    extra = checkpoint.manifest.extra
    if extra.get("fingerprint") != plan.fingerprint:
        raise BadInput(another_run(f"{checkpoint.folder} is", extra.get("mathematics"), plan.run))
    if extra.get("data_fingerprint") != data_fingerprint:
        raise BadInput(
            f"{checkpoint.folder} is of a run on other data (data_fingerprint {extra.get('data_fingerprint')}, and "
            f"this run's is {data_fingerprint}): give the same text and tokenizer to go on, or another --run-dir to "
            f"start anew."
        )


def _state_from(checkpoint: Checkpoint) -> TrainState:
    said: Any = checkpoint.manifest.extra.get("state")
    try:
        if isinstance(said, dict) and _ALWAYS_SAID <= said.keys() <= TrainState.__dataclass_fields__.keys():
            return _STATE.validate_json(json.dumps(said), strict=True)
    except ValidationError:
        pass
    raise BadInput(f"{checkpoint.folder}: the manifest does not say where the run stood; it cannot be resumed.")
