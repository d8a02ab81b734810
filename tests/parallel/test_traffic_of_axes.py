"""Do all axes together put exactly the textbook's bytes on their links?

With H = B S D numbers of one microbatch's hidden states (B sequences of S positions and width D, in the compute dtype),
M microbatches, T ranks of ``tp``, and payloads of whole tensors (tests/harness/collectives.py):

tensor and sequence parallel (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2), for each microbatch

    layer, forward          2 all-gathers and 2 reduce-scatters of H
    layer, backward         the same: the backward of each is the other one
    embedding               1 reduce-scatter of H forward, 1 all-gather of H backward
    last norm               1 all-gather of H forward, 1 reduce-scatter of H backward
    loss                    3 all-reduced numbers of each token: the maximum, the sum of powers, the label's logit

and once a step an all-reduce of the gradients of weights that every rank holds whole. On CPUs a reduce-scatter is an
all-to-all and a sum.

pipeline (Narayanan et al. 2021, arXiv:2104.04473, section 3.2), between the ranks of two neighbouring stages

    forward                 M sends of H / T
    backward                M sends of H / T

and once a step an all-reduce of a tied embedding's gradient, where two ranks have it.

data axes: the formulas of test_traffic.py, W and G being those of a rank's stages, divided by T where ``tp`` cuts them.
"""

from collections import Counter
from typing import Any

import pytest

from tests.harness.collectives import Collective, Collectives
from tests.harness.ranks import run_ranks
from tests.harness.toy import EVEN, lay, toy_run
from tests.harness.training import Engine
from triax.spec.layout import Layout
from triax.spec.model import ModelSpec
from triax.spec.run import Run
from triax.spec.schedule import build
from triax.spec.stages import stage_layers
from triax.spec.weights import Weight, weights_table

MICROBATCHES = 3
SEQUENCES = 2
UNTIED = EVEN.model_copy(update={"num_hidden_layers": 5})
TIED = UNTIED.model_copy(update={"tie_word_embeddings": True})
COMPUTE = {"bf16": ("bfloat16", 2), "fp32": ("float32", 4)}

Volumes = Counter[tuple[str, str, str]]
"""Bytes by axis, kind and dtype."""


def textbook(run: Run, layout: Layout, rank: int) -> Volumes:
    """Return what one step puts on the links of ``rank``, without the sums in fp64."""
    model, here = run.model, layout.coordinate(rank).pp
    table = build(layout.schedule, layout.pp, layout.stages_per_rank, layout.microbatches)
    stages, last = table.stages_of(here), table.num_stages - 1
    is_first, is_last = 0 in stages, last in stages
    weights = weights_of(model, layout, stages)
    dtype, number_bytes = COMPUTE[run.precision.compute]
    tokens = MICROBATCHES * SEQUENCES * run.data.seq_len
    hidden = tokens * model.hidden_size * number_bytes
    volumes: Volumes = Counter()
    if layout.tp > 1:
        num_layers = len({weight.layer for weight in weights} - {None})
        for kind in ("all_gather", "all_to_all"):
            volumes["tp", kind, dtype] = ((2 + 2) * num_layers + is_first + is_last) * hidden
        replicated = sum(weight.numel for weight in weights if weight.tp_dim is None) * 4 // layout.dp_shard
        volumes["tp", "all_reduce", "float32"] = replicated + (3 * tokens * 4 if is_last else 0)
    for stage in stages:
        for neighbour in {stage - 1, stage + 1} & set(range(table.num_stages)):
            if table.owners[neighbour] != here:
                volumes["pp", "send", dtype] += hidden // layout.tp
                volumes["pp", "receive", dtype] += hidden // layout.tp
    if model.tie_word_embeddings and is_first != is_last:
        embedding = model.vocab_size * model.hidden_size * 4
        volumes["tied", "all_reduce", "float32"] = embedding // layout.tp // layout.dp_shard
    held, outside = (
        sum(weight.numel // (1 if weight.tp_dim is None else layout.tp) for weight in weights if is_there(weight))
        for is_there in (lambda weight: True, lambda weight: weight.layer is None)
    )
    if layout.dp_shard > 1:
        gathered = MICROBATCHES * (2 * held - outside) if layout.zero == 3 else held
        volumes["dp_shard", "all_gather", dtype] = gathered * number_bytes
        volumes["dp_shard", "reduce_scatter", "float32"] = held * 4 * (MICROBATCHES if layout.zero >= 2 else 1)
    if layout.dp_replicate > 1:
        volumes["dp_replicate", "all_reduce", "float32"] = held * 4 // layout.dp_shard
    return volumes


def weights_of(model: ModelSpec, layout: Layout, stages: tuple[int, ...]) -> list[Weight]:
    """Return the weights of ``stages``, whole; those of a tied embedding twice where first and last stage are here."""
    last = layout.pp * layout.stages_per_rank - 1
    layers = stage_layers(model, last + 1, layout.stage_cuts)
    rows = weights_table(model)
    held = [weight for weight in rows if weight.layer is not None and any(weight.layer in layers[s] for s in stages)]
    if 0 in stages:
        held += [weight for weight in rows if weight.role == "embedding"]
    if last in stages:
        held += [weight for weight in rows if weight.name == "norm.weight" or weight.role == "head"]
    if last in stages and last > 0:
        held += [weight for weight in rows if weight.role == "embedding" and model.tie_word_embeddings]
    return held


def seen_by(collectives: list[Collective], layout: Layout, rank: int) -> Volumes:
    """Return the bytes that a rank sent; the sums of a step, in fp64, are left out."""
    volumes: Volumes = Counter()
    for collective in collectives:
        if collective.dtype != "float64":
            key = (axis_of(collective, layout, rank), collective.kind, collective.dtype)
            volumes[key] += collective.payload_bytes
    return volumes


def axis_of(collective: Collective, layout: Layout, rank: int) -> str:
    if collective.kind == "all_reduce" and set(collective.peers) <= set(layout.peers(rank, "pp")):
        return "tied"
    (axis,) = [
        axis for axis in ("pp", "dp_replicate", "dp_shard", "tp") if collective.peers == layout.peers(rank, axis)
    ]
    return axis


def volumes_of_two_steps(rank: int, world: int, run: Run, layout: Layout) -> list[dict[tuple[str, str, str], int]]:
    engine = Engine(run, layout, rank)
    steps = []
    for step in range(2):
        with Collectives() as collectives:
            engine.step(step)
        steps.append(dict(seen_by(collectives.seen, layout, rank)))
    return steps


def case(model: ModelSpec, *, always: bool = False, **degrees: Any) -> Any:
    name = "tied" if model.tie_word_embeddings else "untied"
    name += "".join(f" {key}={value}" for key, value in degrees.items())
    return pytest.param(model, degrees, id=name, marks=() if always else pytest.mark.exhaustive)


@pytest.mark.parametrize("compute", ["bf16", pytest.param("fp32", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        case(UNTIED, tp=2),
        case(TIED, tp=4, always=True),
        case(UNTIED, pp=2, always=True),
        case(TIED, pp=4, schedule="GPipe", always=True),
        case(UNTIED, pp=2, schedule="Interleaved1F1B", stages_per_rank=2),
        case(TIED, pp=2, schedule="DualPipeV", stages_per_rank=2, always=True),
        case(TIED, pp=4, tp=2),
        case(UNTIED, pp=2, dp_shard=2, tp=2, zero=1, schedule="ZBVZeroBubble", stages_per_rank=2),
        case(UNTIED, pp=2, dp_shard=2, tp=2, zero=2, schedule="InterleavedZeroBubble"),
        case(TIED, pp=2, dp_shard=2, tp=2, zero=3, always=True),
        case(TIED, dp_replicate=2, dp_shard=2, tp=2, zero=2),
    ],
)
def test_payload_of_a_step_is_the_textbook_volume(model: ModelSpec, degrees: dict[str, int], compute: str) -> None:
    data_ranks = degrees.get("dp_shard", 1) * degrees.get("dp_replicate", 1)
    run = toy_run(
        model,
        train={"sequences_per_step": MICROBATCHES * SEQUENCES * data_ranks},
        precision={"compute": compute, "master": "fp32", "reduce": "fp32"},
    )
    layout = lay(run, SEQUENCES, **degrees)
    for rank, (first, second) in enumerate(run_ranks(volumes_of_two_steps, layout.world_size, run, layout)):
        assert second == textbook(run, layout, rank), f"rank {rank}"
        # In the first step torch's stages agree, by one number for each neighbour, that shapes are known beforehand.
        handshake = {key: size for key, size in first.items() if key[0] == "pp" and key[2] == "int32"}
        assert all(size <= 2 * 4 * layout.stages_per_rank for size in handshake.values())
        assert {key: size for key, size in first.items() if key not in handshake} == second, f"rank {rank}"
