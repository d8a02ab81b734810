"""Does a step put exactly the textbook's bytes on the links?

Payloads are those of whole tensors (tests/harness/collectives.py). With W bytes of weights in the compute dtype, W_o of
them outside the layers, G bytes of gradients in the reduce dtype, M microbatches, and N ranks that shard:

    stage 0   all-reduce G
    stage 1   all-gather W, reduce-scatter G
    stage 2   all-gather W, reduce-scatter M G
    stage 3   all-gather M (2 W - W_o), reduce-scatter M G
    hybrid    as its stage over the N ranks that shard, and all-reduce G / N over the replicas

The textbook's stage 3 (Rajbhandari et al. 2019, arXiv:1910.02054, section 7.2.2) gathers everything twice. What stands
outside the layers is gathered once: the backward needs it at once where the forward ends.

Besides that, two all-reduces of a few numbers over all data ranks: the count of tokens, and the sums of the step.
"""

from collections import Counter
from dataclasses import replace

import pytest

from tests.harness.collectives import Collective, Collectives
from tests.harness.ranks import run_ranks
from tests.harness.toy import EVEN, lay, toy_run
from tests.harness.training import Engine
from triax.spec.layout import Layout
from triax.spec.run import Run
from triax.spec.weights import num_parameters, weights_table

MICROBATCHES = 3
PRECISIONS = (("bf16", "fp32"), ("fp32", "fp32"))
DTYPES = {"bf16": ("bfloat16", 2), "fp32": ("float32", 4)}

DEGREES: list[dict[str, int]] = [
    {"dp_replicate": 4, "zero": 0},
    *({"dp_shard": ranks, "zero": zero} for ranks in (2, 4) for zero in (1, 2, 3)),
    *({"dp_replicate": 2, "dp_shard": 2, "zero": zero} for zero in (1, 2, 3)),
]

Volumes = dict[tuple[str, int, str], int]
"""Bytes by kind, number of ranks and dtype."""


def textbook(layout: Layout, compute: str, reduce: str) -> Volumes:
    outside = sum(weight.numel for weight in weights_table(EVEN) if weight.layer is None)
    (compute, compute_bytes), (reduce, reduce_bytes) = DTYPES[compute], DTYPES[reduce]
    weights, weights_outside = num_parameters(EVEN) * compute_bytes, outside * compute_bytes
    gradients = num_parameters(EVEN) * reduce_bytes
    sharing, replicas = layout.dp_shard, layout.dp_replicate
    gathered = MICROBATCHES * (2 * weights - weights_outside) if layout.zero == 3 else weights
    scattered = MICROBATCHES * gradients if layout.zero >= 2 else gradients
    volumes = {("all_reduce", layout.data_ranks, "float64"): (1 + 3) * 8}
    if sharing > 1:
        volumes[("all_gather", sharing, compute)] = gathered
        volumes[("reduce_scatter", sharing, reduce)] = scattered
    if replicas > 1:
        volumes[("all_reduce", replicas, reduce)] = gradients // sharing
    return volumes


def volumes(collectives: list[Collective]) -> Volumes:
    total: Counter[tuple[str, int, str]] = Counter()
    for collective in collectives:
        total[collective.kind, collective.ranks, collective.dtype] += collective.payload_bytes
    return dict(total)


def collectives_of_two_steps(rank: int, world: int, runs: list[Run], layout: Layout) -> list[list[list[Collective]]]:
    """For each run, what this rank sent in each of two steps."""
    seen = []
    for run in runs:
        engine = Engine(run, layout, rank)
        steps = []
        for step in range(2):
            with Collectives() as collectives:
                engine.step(step)
            steps.append(collectives.seen)
        seen.append(steps)
    return seen


def runs_of(precisions: tuple[tuple[str, str], ...], data_ranks: int) -> list[Run]:
    return [
        toy_run(
            EVEN,
            train={"sequences_per_step": MICROBATCHES * data_ranks},
            precision={"compute": compute, "master": "fp32", "reduce": reduce},
        )
        for compute, reduce in precisions
    ]


@pytest.mark.parametrize("degrees", DEGREES, ids=lambda degrees: " ".join(f"{k}={v}" for k, v in degrees.items()))
def test_payload_of_a_step_is_the_textbook_volume(degrees: dict[str, int]) -> None:
    data_ranks = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    runs = runs_of(PRECISIONS, data_ranks)
    layout = lay(runs[0], **degrees)
    for of_runs in run_ranks(collectives_of_two_steps, data_ranks, runs, layout):
        for (compute, reduce), steps in zip(PRECISIONS, of_runs, strict=True):
            for collectives in steps:
                assert volumes(collectives) == textbook(layout, compute, reduce)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_activations_gathers_no_weight_again(recompute: str) -> None:
    runs = runs_of((("bf16", "fp32"),), 2)
    layout = lay(runs[0], dp_shard=2, zero=3, recompute=recompute)
    for [[first, second]] in run_ranks(collectives_of_two_steps, 2, runs, layout):
        assert volumes(first) == volumes(second) == textbook(layout, "bf16", "fp32")


def test_one_rank_sends_nothing_but_its_sums_to_itself() -> None:
    runs = runs_of((("bf16", "fp32"),), 1)
    layout = lay(runs[0], zero=3)
    [[[first, second]]] = run_ranks(collectives_of_two_steps, 1, runs, layout)
    sums = Collective("all_reduce", ranks=1, dtype="float64", payload_bytes=3 * 8)
    assert first == second == [replace(sums, payload_bytes=8), sums]
