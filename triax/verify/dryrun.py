"""What would one rank of a layout hold, send and compute, on a machine that has neither its cards nor its peers?

The engine itself answers: the parts that train any run are put together and take a step, on tensors that have shapes
and no memory, in a process group that moves nothing (``triax.verify.stand_in``).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from triax.data.batch import Batch
from triax.errors import BadInput
from triax.parallel.launch import Process
from triax.spec.check import require_legal
from triax.spec.cluster import Cluster
from triax.spec.layout import Layout
from triax.spec.run import Run
from triax.verify.observe import Observation, observe
from triax.verify.stand_in import standing_in


@dataclass(frozen=True, slots=True)
class DryRun:
    """One rank's step, and what it is a step of."""

    run: Run
    layout: Layout
    cluster: Cluster
    rank: int
    step: Observation


def dry_run(run: Run, layout: Layout, cluster: Cluster, rank: int) -> DryRun:
    """Return one step of ``run`` as ``rank`` of ``layout`` on ``cluster`` takes it.

    Every token counts, sequences are one document each, and experts are routed to equally. The engine does what it does
    on the cluster's device, a CPU or cards, with nothing compiled. Raises BadInput where the layout is illegal, as the
    planner does, or has no such rank.
    """
    require_legal(layout, run, cluster)
    as_written = run.model_copy(update={"train": run.train.model_copy(update={"compile": "none"})})
    if not 0 <= rank < layout.world_size:
        raise BadInput(f"there is no rank {rank}: {layout.describe()} has ranks 0 to {layout.world_size - 1}.")
    process = Process(rank, layout.world_size, rank % cluster.cards_per_server, 1, torch.device("cpu"))
    with standing_in(rank, layout.world_size, on_cards=cluster.device != "cpu"):
        step = observe(as_written, layout, process, plain_batches(run, layout), cluster.cards_per_server)
    return DryRun(run, layout, cluster, rank, step)


def plain_batches(run: Run, layout: Layout) -> list[Batch]:
    """Return the microbatches of one data rank: the right shapes, in which every token counts."""
    size, length = layout.sequences_per_microbatch, run.data.seq_len
    tokens: Any = np.zeros((size, length), dtype=np.int64)
    bounds = None if run.data.attend_across_documents else np.arange(size + 1, dtype=np.int32) * length
    batch = Batch(
        tokens=tokens, labels=tokens, positions=np.tile(np.arange(length), (size, 1)), cu_seqlens=bounds,
        sequences=np.arange(size),
    )  # fmt: skip
    return [batch] * layout.microbatches
