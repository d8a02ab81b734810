"""What is one step? Count tokens, run the schedule, agree on loss and norm, update where both are as they must be."""

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from triax.data.batch import Batch, Batches, filled
from triax.nn.loss import IGNORE_INDEX
from triax.parallel.execute import Executor
from triax.parallel.expert import ExpertLoad, sum_experts
from triax.parallel.mesh import data_mesh
from triax.parallel.progress import Progress
from triax.parallel.reduce import StepSums, clip, count_over_data, local_gradients, mean_over_ranks, sum_step
from triax.parallel.tensor import sum_replicated
from triax.parallel.tied import TiedEmbedding
from triax.spec.context import computed_length
from triax.spec.layout import Layout
from triax.spec.model import ModelSpec
from triax.spec.run import Run
from triax.train.guard import StepReport
from triax.train.learning_rate import learning_rate
from triax.train.optimizer import Optimizer
from triax.train.spikes import NO_BOUNDS, Bounds
from triax.watch.experts import LayerLoad

AFTER_SCHEDULE: Final = "summing gradients"
"""The phase in which a rank is when the schedule has ended."""


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A microbatch on the device."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor | None

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> "DeviceBatch":
        """Return ``batch`` as tensors on ``device``."""
        return cls(
            tokens=_on(batch.tokens, device),
            labels=_on(batch.labels, device),
            positions=_on(batch.positions, device),
            cu_seqlens=None if batch.cu_seqlens is None else _on(batch.cu_seqlens, device),
        )


def _on(array: "np.ndarray[Any, Any]", device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class PendingReport:
    """A step's report whose numbers may still be on their way from the device."""

    step: int
    tokens: Tensor
    sums: StepSums
    model: ModelSpec
    sequences: int
    """Of the whole step."""
    bounds: Bounds = NO_BOUNDS
    stands: Tensor | None = None
    """A bool on the device, once the update was made or left out."""

    def read(self) -> StepReport:
        """Wait for the numbers and return them."""
        return StepReport(
            step=self.step,
            loss=float(self.sums.loss),
            grad_norm=float(self.sums.grad_norm),
            tokens=int(self.tokens),
            wants_stop=bool(self.sums.flags[0]),
            experts=self._layer_loads(),
            bounds=self.bounds,
        )

    def _layer_loads(self) -> tuple[LayerLoad, ...]:
        experts, layers = self.model.experts, self.model.sparse_layers
        if experts is None:
            return ()
        has_z = experts.scoring_func == "softmax"
        rows = self.sums.seen.view(len(layers), -1).tolist()
        return tuple(
            LayerLoad(layer, tuple(tokens), balance / self.sequences, z / self.sequences if has_z else None)
            for layer, (*tokens, balance, z) in zip(layers, rows, strict=True)
        )


class Stepper:
    """Takes steps of one run on this rank."""

    def __init__(
        self, run: Run, layout: Layout, executor: Executor, optimizer: Optimizer, batches: Batches,
        tied: TiedEmbedding, load: ExpertLoad, mesh: DeviceMesh, data_rank: int, device: torch.device,
        progress: Progress | None = None,
    ) -> None:  # fmt: skip
        """``mesh`` is that of ``layout``; ``executor`` runs the step's schedule; ``progress`` is told of the rest."""
        self._run, self._layout, self._executor = run, layout, executor
        self._optimizer, self._batches = optimizer, batches
        self._mesh, self._data_rank, self._device = mesh, data_rank, device
        self._tied, self._load, self._group = tied, load, data_mesh(mesh).get_group()
        self._progress = progress or Progress()

    def take(
        self, step: int, batches: "list[Batch]", *, asks_stop: bool, bounds: Bounds = NO_BOUNDS,
        rate_factor: float = 1.0, behind: PendingReport | None = None,
    ) -> PendingReport:  # fmt: skip
        """Make update ``step`` (0 is the first) from this rank's microbatches and return its report, not yet read.

        Nothing changes where the loss or the norm is not finite or larger than ``bounds``, or where the step ``behind``
        which this one comes, unread as yet, was left out: all that is decided on the device, from reduced numbers.
        """
        report = self.accumulate(step, batches, asks_stop=asks_stop)
        return self.update(replace(report, bounds=bounds), rate_factor, behind)

    def accumulate(self, step: int, batches: "list[Batch]", *, asks_stop: bool) -> PendingReport:
        """Leave the gradients of update ``step`` in place, summed over all ranks and not clipped; return its report."""
        self._progress.enter_step(step + 1)
        self._progress.enter_phase("counting tokens")
        local_count = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)
        count = count_over_data(local_count, self._group, self._device)
        on_device = self._on_device(batches)
        loss_sum = self._executor.execute(on_device, self._layout.gradient_ranks / count)
        self._progress.enter_phase(AFTER_SCHEDULE)
        parameters = self._optimizer.parameters
        sum_replicated(parameters, self._mesh)
        sum_experts(parameters, self._layout)
        self._tied.sum_gradients()
        self._progress.enter_phase("summing loss and norm")
        counted = [parameter for parameter in parameters if parameter is not self._tied.copy]
        sums = sum_step(loss_sum, count, counted, [asks_stop], self._load.take(), self._layout)
        return PendingReport(step, count, sums, self._run.model, self._run.sequences_per_step)

    def update(
        self, report: PendingReport, rate_factor: float = 1.0, behind: PendingReport | None = None
    ) -> PendingReport:
        """Clip the gradients that are in place and apply them, unless the step must be left out; see ``take``."""
        self._progress.enter_phase("updating weights")
        sums, limits, max_norm = report.sums, report.bounds, self._run.optimizer.max_grad_norm
        if max_norm:
            clip(local_gradients(self._optimizer.parameters), sums.grad_norm, max_norm)
        rate = rate_factor * learning_rate(report.step, self._run.learning_rate, self._run.train.steps)
        stands = sums.loss.isfinite() & sums.grad_norm.isfinite()
        stands &= (sums.loss <= limits.loss) & (sums.grad_norm <= limits.grad_norm)
        if behind is not None and behind.stands is not None:
            stands &= behind.stands
        self._optimizer.update(rate, stands)
        self._load.move_biases(sums.seen, stands)
        self._progress.enter_phase("end of the step")
        return replace(report, stands=stands)

    def read_batches(self, first_sample: int) -> "list[Batch]":
        """Return this rank's microbatches of the step whose first sample is ``first_sample``."""
        layout = self._layout
        return [
            self._batches.microbatch(
                first_sample, index, self._data_rank, layout.data_ranks, layout.sequences_per_microbatch,
                layout.microbatches,
            )
            for index in range(layout.microbatches)
        ]  # fmt: skip

    def evaluate(self) -> float:
        """Return the mean cross-entropy over the held-out sequences, the same in every layout.

        Ranks take turns along the list; where it ends, a rank brings a microbatch in which no token counts, since every
        rank must take part in every collective.
        """
        layout, total = self._layout, self._run.eval.sequences
        per_round = layout.data_ranks * layout.sequences_per_microbatch
        mine = []
        for first in range(self._data_rank * layout.sequences_per_microbatch, _round_up(total, per_round), per_round):
            mine.append(self._batches.eval_batch(first, layout.sequences_per_microbatch))
        return self._mean_loss(mine)

    def loss_of_guessing(self, first_sample: int) -> float:
        """Return the loss of the step's first microbatch against labels drawn at random.

        Random, since real text repeats itself, and tied embeddings know that from the start.
        """
        batch = self.read_batches(first_sample)[0]
        random = np.random.default_rng((self._run.train.seed, self._data_rank))
        guesses = random.integers(0, self._run.model.vocab_size, batch.labels.shape)
        return self._mean_loss([replace(batch, labels=np.where(batch.labels == IGNORE_INDEX, IGNORE_INDEX, guesses))])

    def _mean_loss(self, batches: "list[Batch]") -> float:
        self._progress.enter("evaluation")
        count = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)
        loss_sum = self._executor.evaluate(self._on_device(batches))
        return mean_over_ranks(loss_sum, count, self._layout)

    def _on_device(self, batches: "list[Batch]") -> list[DeviceBatch]:
        length = computed_length(self._run.data.seq_len, self._layout.cp, self._layout.tp)
        return [DeviceBatch.of(filled(batch, length), self._device) for batch in batches]


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
