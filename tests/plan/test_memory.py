"""Is the peak where it should be, as large as published runs measured, and is the verdict honest?"""

import csv
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.megatron_arguments import read_peak_row
from benchmarks.published_networks import Unclear
from triax.plan import candidates as bits
from triax.plan.candidates import SCHEDULE_NAMES, Candidates
from triax.plan.catalogue import card
from triax.plan.engine import ENGINE_NAMES, engine
from triax.plan.memory import ALLOCATED, CATEGORIES, MOMENTS, Memory, memory
from triax.plan.memory.peak import BLOCK, workspace_bytes
from triax.plan.network import Experts, Network
from triax.plan.workload import Workload, precision

ROOT = Path(__file__).parents[2]
MIB = 2**20
GIB = 2**30
LLAMA_8B = Network(32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_70B = Network(80, 8192, 64, 8, 128, 28672, 128256)
MIXTRAL = Network(32, 4096, 32, 8, 128, 14336, 32000, experts=Experts(8, 2, 14336))
WORKLOAD = Workload(64, 4096, precision("bf16"))
H100 = card("h100")


def of(
    network: Network = LLAMA_8B, by: str = "megatron", cuts: tuple[tuple[int, ...], ...] = (), **columns: Any
) -> Memory:
    return memory(network, WORKLOAD, H100, engine(by), Candidates.of(cuts=cuts, **columns))


def test_categories_add_up_to_what_is_allocated_reserved_and_taken() -> None:
    peak = of(dp_shard=8, microbatches=8)
    total = sum(getattr(peak, name) for name in CATEGORIES)
    assert total == pytest.approx(peak.device_bytes)
    assert sum(getattr(peak, name) for name in ALLOCATED) == pytest.approx(peak.allocated_bytes)
    assert peak.allocated_bytes < peak.needed_bytes <= peak.device_bytes
    assert peak.at_moment.max(axis=0) == pytest.approx(peak.allocated_bytes)
    low, high = peak.interval(peak.allocated_bytes)
    assert low < peak.allocated_bytes < high


def test_a_tiny_case_by_hand() -> None:
    """Megatron on one card: 18 B a parameter, two layers, logits in two bytes and in fp32, the loader's mask."""
    network = Network(2, 64, 4, 4, 16, 256, 512, is_gated=False, norm="layer", learned_positions=128)
    numbers = 2 * (64 * 192 + 64 * 64 + 2 * 64 * 256 + 2 * 2 * 64) + 2 * 512 * 64 + 128 * 64 + 2 * 64
    assert network.parameters == numbers
    tokens = 3 * 128
    layer = tokens * (32 * 64 + 4 * 4 + 2 * 4)  # the formula's 34 without masks, fused attention, statistics
    states = 18 * numbers
    activations = 2 * layer + 2 * tokens * 64 * 2
    expected = states + activations + tokens * 512 * 6 + 3 * 128 * 128
    bare = replace(engine("megatron"), has_transformer_engine=False, cublas_workspace_bytes=0.5)
    peak = memory(network, Workload(3, 128, precision("bf16")), H100, bare, Candidates.of(sequences_per_microbatch=3))
    assert peak.allocated_bytes[0] == expected + 1
    assert MOMENTS[peak.moment[0]] == "loss"


def test_workspaces_are_the_libraries_own() -> None:
    """cuBLAS takes 32 MiB a thread on Hopper and 8.125 elsewhere, Transformer Engine 32 MiB from Hopper on, else 4."""
    with_te, without = engine("megatron"), engine("fsdp1")
    assert workspace_bytes(card("a100-80"), without, LLAMA_8B) == 2 * 8.125 * MIB
    assert workspace_bytes(card("a100-80"), with_te, LLAMA_8B) == (2 * 8.125 + 4) * MIB
    assert workspace_bytes(H100, with_te, LLAMA_8B) == 3 * 32 * MIB
    assert workspace_bytes(H100, with_te, MIXTRAL) == 7 * 32 * MIB


def test_the_first_rank_of_a_pipeline_is_the_fullest_and_the_last_one_has_the_logits() -> None:
    columns = {"pp": 4, "microbatches": 16, "dp_shard": 8}
    assert of(**columns).pipeline_rank[0] == 0
    last = memory(LLAMA_8B, WORKLOAD, H100, engine("megatron"), Candidates.of(**columns), pipeline_rank=-1)
    assert (last.pipeline_rank[0], MOMENTS[last.moment[0]]) == (3, "loss")
    assert last.logits[0] == 4096 * 128256 * 6
    assert last.allocated_bytes[0] < of(**columns).allocated_bytes[0]


def test_all_forwards_first_keep_what_every_loss_has_left() -> None:
    """GPipe holds probabilities of all microbatches on the last rank; 1F1B those of one."""

    def logits(name: str, microbatches: int) -> float:
        candidates = Candidates.of(pp=2, microbatches=microbatches, schedule=SCHEDULE_NAMES.index(name))
        last = memory(LLAMA_8B, WORKLOAD, H100, engine("megatron"), candidates, pipeline_rank=-1)
        return float(last.logits[0]) / (4096 * 128256)

    assert logits("GPipe", 8) == 6 + 7 * 4
    assert logits("1F1B", 8) == 6


def test_deepspeeds_pipeline_keeps_the_logits_of_two_microbatches() -> None:
    """Each of two buffers holds a microbatch's logits in fp32 until the next one in it is computed."""

    def logits(microbatches: int) -> float:
        candidates = Candidates.of(pp=2, dp_shard=4, zero=1, microbatches=microbatches)
        by = engine("megatron-deepspeed")
        last = memory(LLAMA_8B, WORKLOAD, H100, by, candidates, pipeline_rank=-1)
        assert MOMENTS[last.moment[0]] == "loss"
        return float(last.logits[0]) / (4096 * 128256)

    assert (logits(1), logits(2), logits(8)) == (10, 14, 14)


def test_buckets_of_the_steps_end_are_reserved_beside_activations_but_not_needed_with_them() -> None:
    """Up to ZeRO-1 gradients are reduced once, when activations are gone; then the bucket is part of the peak."""
    columns = {"tp": 8, "pp": 4, "dp_shard": 4, "microbatches": 8}
    by = engine("megatron-deepspeed")
    without = replace(by, bucket_bytes=0.0)

    def peaks(**more: int) -> tuple[Memory, Memory]:
        candidates = Candidates.of(**columns, **more)
        return tuple(memory(LLAMA_70B, WORKLOAD, H100, each, candidates) for each in (by, without))  # type: ignore[return-value]

    late, none = peaks(zero=1)
    assert MOMENTS[late.moment[0]] == "backward"
    assert late.needed_bytes[0] == none.needed_bytes[0]
    assert late.reserved_bytes[0] - none.reserved_bytes[0] == by.bucket_bytes
    at = MOMENTS.index("update")
    assert late.at_moment[at, 0] - none.at_moment[at, 0] == by.bucket_bytes
    early, none = peaks(zero=2)
    assert early.allocated_bytes[0] - none.allocated_bytes[0] == by.bucket_bytes


def test_uneven_stages_move_the_peak() -> None:
    even = of(pp=4, microbatches=16, dp_shard=8)
    light_first = of(pp=4, microbatches=16, dp_shard=8, cut=0, cuts=((5, 9, 9, 9),))
    assert light_first.pipeline_rank[0] == 1
    assert light_first.allocated_bytes[0] > even.allocated_bytes[0] * 0.8


LAYOUTS = st.fixed_dictionaries(
    {
        "pp": st.sampled_from([1, 2, 4, 8]),
        "dp_shard": st.sampled_from([1, 2, 8]),
        "tp": st.sampled_from([1, 2, 4]),
        "cp": st.sampled_from([1, 2]),
        "zero": st.integers(0, 3),
        "microbatches": st.sampled_from([1, 4, 16]),
        "sequences_per_microbatch": st.sampled_from([1, 2]),
        "recompute": st.sampled_from([0, bits.SELECTIVE, bits.FULL, bits.NORMS]),
        "sequence_parallel": st.sampled_from([0, 1]),
    }
)


@given(LAYOUTS, st.sampled_from(ENGINE_NAMES), st.sampled_from([LLAMA_8B, MIXTRAL]))
def test_less_of_anything_never_needs_more(layout: dict[str, int], by: str, network: Network) -> None:
    whole = of(network, by, **layout)
    peak = whole.allocated_bytes[0]
    assert np.isfinite(peak)
    assert (whole.at_moment >= 0).all()
    assert of(network, by, **layout | {"recompute": bits.FULL}).allocated_bytes[0] <= peak * (1 + 1e-9)
    more_tokens = layout | {"sequences_per_microbatch": layout["sequences_per_microbatch"] + 1}
    assert (of(network, by, **more_tokens).at_moment[:3] > whole.at_moment[:3]).all()
    if layout["dp_shard"] > 1 and layout["zero"] < 2:
        further = of(network, by, **layout | {"zero": layout["zero"] + 1})
        assert further.save_bytes[0] <= whole.save_bytes[0] * (1 + 1e-9)
    longer = replace(network, layers=network.layers + 8)
    assert of(longer, by, **layout).allocated_bytes[0] > peak


def test_each_zero_stage_needs_less_and_the_last_the_least() -> None:
    needs = of(LLAMA_8B, "triax", zero=[0, 1, 2, 3], dp_shard=8, microbatches=2).needed_bytes
    assert list(needs) == sorted(needs, reverse=True)
    assert needs[3] < needs[0] / 2


def test_many_candidates_are_each_of_them() -> None:
    """Blocks, kinds of pipelines and probes keep candidates apart."""
    generator = np.random.default_rng(0)
    count = BLOCK + 7
    columns = {
        "pp": generator.choice([1, 2, 4], count), "dp_shard": generator.choice([1, 8], count),
        "zero": generator.integers(0, 4, count), "microbatches": generator.choice([4, 8, 12], count),
    }  # fmt: skip
    together = of(**columns)
    for index in (0, 1, BLOCK - 1, BLOCK, count - 1):
        alone = of(**{name: int(column[index]) for name, column in columns.items()})
        for name in (*CATEGORIES, "save_bytes", "resume_bytes"):
            assert getattr(alone, name)[0] == getattr(together, name)[index]
        assert alone.pipeline_rank[0] == together.pipeline_rank[index]
        assert together.at_moment[:, index] == pytest.approx(alone.at_moment[:, 0])


def test_a_hundred_thousand_candidates_take_less_than_a_second() -> None:
    generator = np.random.default_rng(1)
    count = 100_000
    pp = generator.choice([1, 2, 4, 8, 16], count)
    stages = np.where(pp > 1, generator.choice([1, 2, 4], count), 1)
    names = np.where(stages > 1, SCHEDULE_NAMES.index("Interleaved1F1B"), SCHEDULE_NAMES.index("1F1B"))
    candidates = Candidates.of(
        pp=pp, stages_per_rank=stages, schedule=names, tp=generator.choice([1, 2, 4, 8], count), dp_shard=64,
        microbatches=generator.choice([16, 32, 64, 128], count), recompute=generator.choice([0, bits.FULL], count),
    )  # fmt: skip
    seconds = []
    for _ in range(3):
        start = time.process_time()
        memory(LLAMA_70B, WORKLOAD, H100, engine("megatron"), candidates)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1.0


def test_a_card_must_have_what_is_needed_and_the_margin() -> None:
    peak = of(dp_shard=8, microbatches=2)
    just_enough = replace(peak, usable_bytes=float(peak.needed_bytes[0]) / (1 - peak.margin) * 1.0001)
    assert just_enough.fits[0]
    assert not replace(just_enough, usable_bytes=just_enough.usable_bytes * 0.999).fits[0]
    assert of(MIXTRAL, dp_shard=8).margin == pytest.approx(3 * peak.margin)


def test_the_textbooks_70b_does_not_fit_one_server_without_sharding() -> None:
    """70e9 x 16 bytes are 1.1 TB: eight cards of 80 GB hold it with ZeRO-3 across 64, not with replicas."""
    fits = of(LLAMA_70B, "triax", zero=[0, 3], dp_shard=64, tp=1, recompute=bits.FULL, microbatches=1).fits
    assert list(fits) == [False, True]


def test_narrow_gradients_are_widened_in_the_update_alone() -> None:
    narrow = replace(engine("megatron"), grad_bytes=2, bucket_padding=1)
    peak = memory(LLAMA_8B, WORKLOAD, H100, narrow, Candidates.of(dp_shard=4, microbatches=16))
    update = peak.at_moment[MOMENTS.index("update"), 0] - peak.workspaces[0]
    assert update == pytest.approx(LLAMA_8B.parameters * (2 + 2 + 12 / 4 + 4 / 4), rel=1e-6)


def test_a_ring_keeps_two_blocks_and_a_partial_result() -> None:
    """Keys and values of 2 x 8 x 128, twice in two bytes; what 32 heads return once in four."""
    tokens = 4096 / 2
    ring = of(cp=2, dp_shard=4, microbatches=8).buffers - of(cp=1, dp_shard=4, microbatches=8).buffers
    mask = 4096**2 / 2
    assert ring[0] == tokens * (2 * 2048 * 2 + 4096 * 4) - mask


def test_checkpoints_need_less_than_a_step() -> None:
    peak = of(LLAMA_8B, "triax", dp_shard=8, zero=1, microbatches=2)
    numbers = LLAMA_8B.parameters / 8
    assert peak.save_bytes[0] - peak.workspaces[0] == pytest.approx(12 * numbers)
    assert peak.save_bytes[0] < peak.resume_bytes[0] < peak.allocated_bytes[0]


@pytest.fixture(scope="module")
def published() -> list[tuple[Any, Memory, float, float]]:
    """(row, prediction, measured peak, measured after the step) of every fourth row of the published tests."""
    rows = []
    with (ROOT / "tests/golden/peak_memory.csv").open(newline="", encoding="utf-8") as file:
        for raw in csv.DictReader(file):
            try:
                row = read_peak_row(raw)
            except Unclear:
                continue
            at_last = memory(row.network, row.workload, row.machine.card, row.engine, row.candidates, pipeline_rank=-1)
            rows.append((row, at_last, float(raw["peak_allocated_bytes"]), float(raw["allocated_bytes"])))
    return rows


def errors(published: list[tuple[Any, Memory, float, float]], *, is_moe: bool) -> np.ndarray:
    pairs = [(peak.allocated_bytes[0], measured) for row, peak, measured, _ in published if row.is_moe == is_moe]
    return np.array([abs(predicted / measured - 1) for predicted, measured in pairs])


def test_published_peaks_are_predicted(published: list[tuple[Any, Memory, float, float]]) -> None:
    """Functional tests of Megatron-LM (their golden values; the file names each): the errors that are claimed."""
    dense, experts = errors(published, is_moe=False), errors(published, is_moe=True)
    assert len(dense) + len(experts) > 80
    assert (np.median(dense) < 0.005, np.quantile(dense, 0.9) < 0.03) == (True, True)
    assert (np.median(experts) < 0.03, np.quantile(experts, 0.9) < 0.12) == (True, True)


def test_published_states_are_predicted(published: list[tuple[Any, Memory, float, float]]) -> None:
    """What is allocated after a step, dense networks alone on their card: within 1 % or 40 MiB."""
    for row, peak, _, resting in published:
        if row.is_moe or int(row.candidates.pp[0]) > 1 or row.workload.precision.recipe != "bf16":
            continue
        if "release" in row.family or "local" in row.family or row.family.startswith("gpt/gpt3_mcore_tp"):
            continue
        assert peak.save_bytes[0] == pytest.approx(resting, rel=0.01, abs=40 * MIB), row.id


def test_intervals_hold_four_of_five_published_peaks(published: list[tuple[Any, Memory, float, float]]) -> None:
    inside = [
        low <= measured <= high
        for _, peak, measured, _ in published
        for (low,), (high,) in [peak.interval(peak.allocated_bytes)]
    ]
    assert 0.7 < np.mean(inside) < 0.95
