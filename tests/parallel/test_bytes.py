"""Does a rank hold exactly the bytes that the table of ZeRO stages says?

They are counted twice from real tensors, by ways that share nothing: by walking what ``fully_shard`` and the optimizer
hold, and by scanning all of Python's memory for tensors that were not there before.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.harness.memory import Scan
from tests.harness.ranks import run_ranks
from tests.harness.toy import EVEN, MadeUpSequences, lay, toy_run
from tests.harness.training import CPU, Engine
from triax.spec.layout import Layout
from triax.spec.run import Run
from triax.spec.weights import num_parameters
from triax.train.optimizer import Optimizer
from triax.train.step import DeviceBatch

MICROBATCHES = 3

Share = tuple[int, int]
"""Bytes per parameter: held whole, and held in N parts, one on each rank of dp_shard."""


@dataclass(frozen=True)
class Row:
    """What a rank holds between the microbatches of a step, in the columns of the table in triax/parallel/shard.py."""

    master: Share
    compute: Share
    gradients: Share
    adam: Share


WHOLE, SHARED, NONE = (4, 0), (0, 4), (0, 0)
TABLE = {
    # The table of the design: 16, 6 + 12/N, 2 + 16/N, 16/N.
    ("bf16", "fp32"): {
        0: Row(WHOLE, NONE, WHOLE, (8, 0)),
        1: Row(SHARED, (2, 0), WHOLE, (0, 8)),
        2: Row(SHARED, (2, 0), SHARED, (0, 8)),
        3: Row(SHARED, NONE, SHARED, (0, 8)),
    },
    # Gradients that are whole are kept as they are reduced, here in bf16: 14, 4 + 12/N. Shards are kept in fp32.
    ("bf16", "bf16"): {
        0: Row(WHOLE, NONE, (2, 0), (8, 0)),
        1: Row(SHARED, (2, 0), (2, 0), (0, 8)),
        2: Row(SHARED, (2, 0), SHARED, (0, 8)),
        3: Row(SHARED, NONE, SHARED, (0, 8)),
    },
    # Gathered weights are a copy of four bytes also where nothing is cast: 16, 8 + 12/N, 4 + 16/N, 16/N.
    ("fp32", "fp32"): {
        0: Row(WHOLE, NONE, WHOLE, (8, 0)),
        1: Row(SHARED, WHOLE, WHOLE, (0, 8)),
        2: Row(SHARED, WHOLE, SHARED, (0, 8)),
        3: Row(SHARED, NONE, SHARED, (0, 8)),
    },
}

DEGREES: list[dict[str, int]] = [
    *({"dp_replicate": ranks, "zero": 0} for ranks in (2, 4)),
    *({"dp_shard": ranks, "zero": zero} for ranks in (2, 4) for zero in (1, 2, 3)),
    *({"dp_replicate": 2, "dp_shard": 2, "zero": zero} for zero in (1, 2, 3)),
]


def expected(layout: Layout, compute: str, reduce: str) -> dict[str, int]:
    row = TABLE[compute, reduce][layout.zero]
    shares = {field.name: getattr(row, field.name) for field in fields(row)}
    if layout.dp_replicate > 1 and layout.zero >= 2 and reduce == "bf16":
        shares["gradients"] = (0, 2)  # replicas are summed once, at the end, and until then in the reduce precision
    held = {}
    for name, (whole, shared) in shares.items():
        held[name], rest = divmod(num_parameters(EVEN) * (whole * layout.dp_shard + shared), layout.dp_shard)
        assert rest == 0
    return held


@dataclass(frozen=True)
class Held:
    """Bytes that one rank holds at one moment, counted both ways."""

    by_walk: dict[str, int]
    by_scan: int


@pytest.mark.parametrize("degrees", DEGREES, ids=lambda degrees: " ".join(f"{k}={v}" for k, v in degrees.items()))
def test_bytes_between_microbatches_are_those_of_the_table(degrees: dict[str, int]) -> None:
    data_ranks = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    runs = [
        toy_run(
            EVEN,
            train={"sequences_per_step": MICROBATCHES * data_ranks},
            precision={"compute": compute, "master": "fp32", "reduce": reduce},
        )
        for compute, reduce in TABLE
    ]
    layout = lay(runs[0], **degrees)
    for of_runs in run_ranks(measure, data_ranks, runs, layout):
        for (compute, reduce), moments in zip(TABLE, of_runs, strict=True):
            table = expected(layout, compute, reduce)
            *between_microbatches, after_update = moments
            assert len(between_microbatches) == 2 * (MICROBATCHES - 1)
            for held in between_microbatches:
                assert held.by_walk == table
                assert held.by_scan == sum(table.values())
            rest = {"master": table["master"], "compute": 0, "gradients": 0, "adam": table["adam"]}
            assert after_update.by_walk == rest
            assert after_update.by_scan == sum(rest.values())


def measure(rank: int, world: int, runs: list[Run], layout: Layout) -> list[list[Held]]:
    """For each run, what this rank holds between the microbatches of two steps and after both."""
    return [_measure_run(rank, run, layout) for run in runs]


def _measure_run(rank: int, run: Run, layout: Layout) -> list[Held]:
    sequences = MadeUpSequences(run.model.vocab_size)
    mine: Any = sequences.microbatches(run, layout, layout.data_rank(rank), step=0)
    batches = [DeviceBatch.of(batch, CPU) for batch in mine]
    scan = Scan()
    engine = Engine(run, layout, rank)
    moments: list[Held] = []

    def hold() -> None:
        (stage,) = engine.stages
        by_walk = _walk(stage, engine.optimizer)
        moments.append(Held(by_walk, scan.held_bytes(patience_s=5.0, until=sum(by_walk.values()))))

    for _ in range(2):
        engine.executor.execute(_Watched(batches, hold), torch.tensor(1e-2))
        engine.optimizer.update(1e-3, torch.tensor(True))
    hold()
    return moments


class _Watched(Sequence[DeviceBatch]):
    """Microbatches that tell when the next one is asked for."""

    def __init__(self, batches: list[DeviceBatch], between: Callable[[], None]) -> None:
        self._batches, self._between = batches, between

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        if index > 0:
            self._between()
        return self._batches[index]


def _walk(stage: torch.nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Bytes by column of the table, from the places where ``fully_shard`` and the optimizer keep what they hold."""
    groups = [
        group
        for module in stage.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    gathered = [p._unsharded_param for p in parameters if hasattr(p, "_unsharded_param")]
    return {
        "master": _bytes(p.sharded_param for p in parameters),
        "compute": _bytes((output for p in parameters for output in p.all_gather_outputs), gathered),
        "gradients": _bytes(
            (p.sharded_param.grad for p in parameters),
            (weight.grad for weight in gathered),
            (p.unsharded_accumulated_grad for p in parameters),
            (group._partial_reduce_output for group in groups),
        ),
        "adam": _bytes(state for name, state in optimizer.state_tensors().items() if ".step." not in name),
    }


def _bytes(*sources: Any) -> int:
    """Bytes of the storages behind the tensors of all ``sources``, each storage once."""
    return sum({storage.data_ptr(): storage.nbytes() for storage in _storages(sources)}.values())


def _storages(sources: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in (tensor for source in sources for tensor in source):
        if isinstance(tensor, Tensor):
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            yield local.untyped_storage()
