"""How is a schedule table executed on this rank?

Without a pipeline the table has one row for one stage, such as F0 B0 F1 B1, and this file walks it: gradient
accumulation and pipelining are one code path. torch's pipelining runtime would keep a whole stage gathered under
ZeRO-3.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from triax.nn.decoder import Decoder
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


def execute(
    table: ScheduleTable, stage: Decoder, layout: Layout, microbatch: Callable[[int], Microbatch], scale: Tensor
) -> Tensor:
    """Run one step of ``table`` on ``stage`` and leave its gradients in place; return the summed loss, detached.

    Each backward is of ``loss * scale``: the caller puts the global token count and the averaging of the data axes
    there.
    """
    losses: dict[int, Tensor] = {}
    total = torch.zeros((), dtype=torch.float64, device=scale.device)
    backwards = 0
    for action in (part for slot in table.rows[0] for part in slot.parts):
        if action.kind == "F":
            losses[action.microbatch] = forward(stage, microbatch(action.microbatch))
            continue
        backwards += 1
        before_backward(stage, layout.zero, is_last_microbatch=backwards == layout.microbatches)
        loss = losses.pop(action.microbatch)
        total += loss.detach()
        (loss * scale.to(loss.dtype)).backward()
    return total


def forward(stage: Decoder, batch: Microbatch) -> Tensor:
    """Return the summed loss of one microbatch."""
    loss: Tensor = stage(batch.tokens, batch.positions, batch.cu_seqlens, batch.labels)
    return loss


@torch.no_grad()
def evaluate(stage: Decoder, batches: Sequence[Microbatch]) -> Tensor:
    """Return the summed loss over ``batches`` without gradients; every data rank must bring equally many."""
    total = torch.stack([forward(stage, batch).to(torch.float64) for batch in batches]).sum()
    release(stage)
    return total
