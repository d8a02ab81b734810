"""How is a schedule table executed on this rank?

Without a pipeline the table has one row for one stage, such as F0 B0 F1 B1, and ``LocalExecutor`` walks it: gradient
accumulation and pipelining are one code path to the step. torch's pipelining runtime would keep a whole stage gathered
under ZeRO-3.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from triax.nn.decoder import Decoder
from triax.parallel.progress import Progress
from triax.parallel.shard import before_backward, release
from triax.spec.layout import Layout
from triax.spec.schedule import ScheduleTable


class Microbatch(Protocol):
    """What a forward reads, on the device."""

    @property
    def tokens(self) -> Tensor:
        """(B, S) int64."""

    @property
    def labels(self) -> Tensor:
        """(B, S) int64, -100 where a token does not count."""

    @property
    def positions(self) -> Tensor:
        """(B, S) int64, counted inside documents."""

    @property
    def cu_seqlens(self) -> Tensor | None:
        """int32 document bounds in the flattened batch, or None where each sequence is one document."""


class Executor(Protocol):
    """Runs the forwards and backwards of a step on this rank."""

    def execute(self, batches: Sequence[Microbatch], scale: Tensor) -> Tensor:
        """Run one step on this rank's microbatches and leave gradients in place; return the summed loss, detached.

        Each backward is of ``loss * scale``: the caller puts the global token count and the averaging of the data axes
        there. Ranks without the last stage return zero.
        """

    def evaluate(self, batches: Sequence[Microbatch]) -> Tensor:
        """Return the summed loss over ``batches`` without gradients; every data rank must bring equally many."""


class LocalExecutor:
    """Runs a table of one stage."""

    def __init__(self, table: ScheduleTable, stage: Decoder, layout: Layout, progress: Progress) -> None:
        self._stage, self._layout, self._progress = stage, layout, progress
        self._actions = tuple(table.actions(0))

    def execute(self, batches: Sequence[Microbatch], scale: Tensor) -> Tensor:
        """See ``Executor.execute``."""
        losses: dict[int, Tensor] = {}
        total = torch.zeros((), dtype=torch.float64, device=scale.device)
        backwards = 0
        self._progress.follow(self._actions)
        for action in self._actions:
            self._progress.begin(action)
            if action.kind == "F":
                losses[action.microbatch] = self._forward(batches[action.microbatch])
            else:
                backwards += 1
                is_last = backwards == self._layout.microbatches
                before_backward(self._stage, self._layout.zero, is_last_microbatch=is_last)
                loss = losses.pop(action.microbatch)
                total += loss.detach()
                (loss * scale.to(loss.dtype)).backward()
            self._progress.end()
        return total

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Microbatch]) -> Tensor:
        """See ``Executor.evaluate``."""
        total = torch.stack([self._forward(batch).to(torch.float64) for batch in batches]).sum()
        release(self._stage)
        return total

    def _forward(self, batch: Microbatch) -> Tensor:
        loss: Tensor = self._stage(batch.tokens, batch.positions, batch.cu_seqlens, batch.labels)
        return loss
