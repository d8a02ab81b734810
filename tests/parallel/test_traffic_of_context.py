"""Does a cut sequence put exactly the textbook's bytes on its links?

With P = cp ranks, B sequences of S positions, N query heads and K key/value heads of width H, and KV = 2 B S/P K H
numbers of a rank's own keys and values; payloads of whole tensors (tests/harness/collectives.py), for each layer and
microbatch:

    all_gather   2 all-gathers of P KV, one in the forward and one in the backward, and a reduce-scatter of P KV
    ring         forward P - 1 sends of KV; backward as many, and P of their gradients, in fp32
    all_to_all   2 all-to-alls of B S/P (N + 2 K) H, and 2 of B S/P N H

On CPUs a reduce-scatter is an all-to-all and a sum. Weights are shared over dp_shard x cp as they are over dp_shard:
the formulas of test_traffic.py.
"""

from collections import Counter

import pytest

from tests.harness.collectives import Collectives
from tests.harness.ranks import run_ranks
from tests.harness.toy import toy_run
from tests.harness.training import Engine
from triax.spec.layout import ContextMethod, Layout
from triax.spec.model import ModelSpec
from triax.spec.run import Run
from triax.spec.weights import num_parameters, weights_table

MICROBATCHES, SEQUENCES, SEQ_LEN = 3, 2, 16
MODEL = ModelSpec(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=64,
)  # fmt: skip
BF16 = {"compute": "bf16", "master": "fp32", "reduce": "fp32"}

Volumes = dict[tuple[tuple[int, ...], str, str], int]
"""Bytes by the ranks between which they are, kind and dtype."""


def textbook(method: ContextMethod, cp: int) -> dict[tuple[str, str], int]:
    own = MICROBATCHES * MODEL.num_hidden_layers * SEQUENCES * SEQ_LEN // cp * MODEL.head_width
    key_values, heads = 2 * own * MODEL.kv_heads, own * MODEL.num_attention_heads
    match method:
        case "all_gather":
            return {
                ("all_gather", "bfloat16"): 2 * cp * key_values * 2,
                ("all_to_all", "bfloat16"): cp * key_values * 2,
            }
        case "ring":
            passed = {"bfloat16": 2 * (cp - 1) * key_values * 2, "float32": cp * key_values * 4}
            return {(kind, dtype): size for kind in ("send", "receive") for dtype, size in passed.items()}
        case "all_to_all":
            return {("all_to_all", "bfloat16"): (2 * (heads + key_values) + 2 * heads) * 2}


def volumes_of_two_steps(rank: int, world: int, run: Run, layout: Layout) -> list[Volumes]:
    engine = Engine(run, layout, rank)
    steps = []
    for step in range(2):
        with Collectives() as collectives:
            engine.step(step)
        volumes: Counter[tuple[tuple[int, ...], str, str]] = Counter()
        for seen in collectives.seen:
            if seen.dtype != "float64":  # the sums of a step
                volumes[seen.peers, seen.kind, seen.dtype] += seen.payload_bytes
        steps.append(dict(volumes))
    return steps


def run_on(data_ranks: int) -> Run:
    return toy_run(
        MODEL, train={"sequences_per_step": MICROBATCHES * SEQUENCES * data_ranks}, data={"seq_len": SEQ_LEN},
        precision=BF16,
    )  # fmt: skip


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("method", ["all_gather", "ring", "all_to_all"])
def test_payload_of_a_step_is_the_textbook_volume(method: ContextMethod, cp: int) -> None:
    layout = Layout(
        cp=cp, cp_method=method, zero=0, microbatches=MICROBATCHES, sequences_per_microbatch=SEQUENCES
    )  # fmt: skip
    everyone = tuple(range(cp))
    expected = {(everyone, *key): size for key, size in textbook(method, cp).items()}
    expected[everyone, "all_reduce", "float32"] = num_parameters(MODEL) * 4
    for steps in run_ranks(volumes_of_two_steps, cp, run_on(1), layout):
        assert steps == [expected, expected]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_ranks_of_a_sequence_share_weights_with_those_of_others(zero: int) -> None:
    layout = Layout(
        dp_replicate=1, dp_shard=2, cp=2, cp_method="ring", zero=zero, microbatches=MICROBATCHES,
        sequences_per_microbatch=SEQUENCES,
    )  # fmt: skip
    weights = num_parameters(MODEL)
    outside = sum(weight.numel for weight in weights_table(MODEL) if weight.layer is None)
    gathered = MICROBATCHES * (2 * weights - outside) if zero == 3 else weights
    scattered = MICROBATCHES * weights if zero >= 2 else weights
    for rank, steps in enumerate(run_ranks(volumes_of_two_steps, 4, run_on(2), layout)):
        expected = {(layout.peers(rank, "cp"), *key): size for key, size in textbook("ring", 2).items()}
        expected[(0, 1, 2, 3), "all_gather", "bfloat16"] = gathered * 2
        expected[(0, 1, 2, 3), "reduce_scatter", "float32"] = scattered * 4
        assert steps == [expected, expected]
