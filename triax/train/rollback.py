"""How does a run go back to an earlier state of its own, in place, without starting any process anew?

What it then holds is bit for bit what a fresh start from that checkpoint would hold: tensors are filled in place, and
everything else that a run is made of is either part of the state or a pure function of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.distributed import ProcessGroup

from triax.checkpoint.save import CheckpointWriter
from triax.errors import BadInput
from triax.nn.decoder import Decoder
from triax.spec.plan import Plan
from triax.train.cadence import FIRST_AFTER
from triax.train.guard import GuardState, Rollback
from triax.train.optimizer import Optimizer
from triax.train.origin import begin
from triax.train.run_folder import RunFolder
from triax.train.state import TrainState, restore, tensors_of


@dataclass(frozen=True, slots=True)
class Past:
    """What a run can go back to. All ranks call every method together."""

    plan: Plan
    folder: RunFolder
    data_fingerprint: str
    stages: Sequence[Decoder]
    optimizer: Optimizer
    writer: CheckpointWriter
    group: ProcessGroup | None

    def return_to(self, wish: Rollback, now: TrainState, guard: GuardState) -> tuple[TrainState, str]:
        """Fill weights and optimizer as ``wish`` says; return the state there, and what could not be removed.

        No save may be in flight. The state remembers what no earlier one can know: ``guard``'s case, and the samples
        that ``now`` passes over. Raises BadInput where there is nothing to go back to; the tensors are undefined then.
        """
        tensors = tensors_of(self.stages, self.optimizer)
        self.optimizer.before_update()
        then, checkpoint, _ = restore(
            self.folder, self.plan, self.data_fingerprint, tensors, self.group, at_most=wish.at_most
        )
        if checkpoint is None:
            self._begin_anew(wish)
        self.optimizer.copy_tied()
        problem = self.writer.discard_after(then.step)
        factor = self.plan.run.guard.learning_rate_cut if wish.cuts_learning_rate else 1.0
        then = replace(
            then,
            rate_factor=now.rate_factor * factor,
            guard=replace(guard, losses=then.guard.losses, grad_norms=then.guard.grad_norms),
        )
        for samples in (*now.skipped, *(() if wish.skip is None else (wish.skip,))):
            then = then.passing_over(samples)
        return then, problem

    def _begin_anew(self, wish: Rollback) -> None:
        said = self.plan.run.checkpoint.every_steps
        every = FIRST_AFTER if said == "auto" else said
        if every and wish.at_most >= every:
            raise BadInput(
                f"{self.folder.checkpoints} holds no checkpoint of step {wish.at_most} or before to go back to: raise "
                f"checkpoint.keep."
            )
        self.optimizer.reset()
        begin(self.stages, self.plan.run, self.plan.layout, self.group)
