"""What does a row of published runs say about memory, beyond what its time needs? Or why can it not be judged?

Which activations are kept, what a framework's recipe keeps of weights and gradients, and which bytes the row prints.
What was measured is read by ``measured_peak_bytes`` and ``ran_out`` alone, after all predictions are fixed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from benchmarks.published_networks import Unclear
from benchmarks.published_rows import Row
from triax.plan.candidates import Candidates
from triax.plan.memory import Memory, memory

Printed = Literal["allocated", "reserved", "device"]
_GIB: Final = 2**30


def for_memory(raw: Mapping[str, str], row: Row) -> Row:
    """Return ``row`` with what counts for memory alone; raise Unclear where it does not say what is kept."""
    kept = raw.get("activation_checkpointing", "").strip()
    framework = raw.get("framework", "")
    profile, network, c = row.engine, row.network, row.candidates
    if not kept and profile.name not in ("nanotron", "oneflow"):
        raise Unclear("it does not say which activations are computed again")
    if re.search(r"selective recompute", kept, re.I):
        raise Unclear("it does not say which modules are computed again")
    if int(c.pp[0]) > 1 and not raw.get("micro_batch", "").strip() and "torchtitan" not in framework.lower():
        raise Unclear("it does not say how many sequences a microbatch has, and its pipeline holds several")
    if re.search(r"2p\b", raw.get("pp_schedule", "")):
        raise Unclear("its schedule (ZB-2p) holds twice as many microbatches as any schedule here")
    if re.search(r"offload", kept, re.I):
        raise Unclear("some activations wait in the server's memory, and it does not say which")
    if re.search(r"nemo|bridge|megatron-core", framework, re.I) and profile.name == "megatron":
        # NVIDIA's performance recipes reduce gradients in bf16, and gather weights in the narrow type.
        # Their squared ReLU has a kernel that weights experts' activations as well.
        profile = replace(
            profile, grad_bytes=2, grad_reduce_bytes=2, narrow_weights=True, weights_expert_activations=False
        )
    if re.search(r"bridge", framework, re.I):
        # Its recipes compute the loss with Transformer Engine: logits in the compute type, and their gradient.
        profile = replace(profile, loss_bytes=4.0)
    if _has_narrow_moments(raw, row):
        profile = replace(profile, moment_bytes=4.0)
    if profile.name == "torchtitan":
        is_new = row.release >= "2025-05" and raw.get("compile") == "y"
        profile = replace(profile, loss_bytes=4.0 if is_new else None)
        c = _microbatches_of_torchtitan(raw, c)
    if profile.family == "deepspeed":
        if int(c.zero[0]) == 3:
            raise Unclear("its ZeRO-3 runs keep a part in the server's memory, and it does not say which")
        if row.workload.precision.recipe == "fp16":
            profile = replace(profile, grad_bytes=2)
    if profile.name in ("megatron-2021", "megatron-deepspeed", "oneflow") and not re.search(
        "bloom", network.name, re.I
    ):
        network = replace(network, dropout=0.1)
    return replace(row, engine=profile, network=network, candidates=c)


def _has_narrow_moments(raw: Mapping[str, str], row: Row) -> bool:
    """Whether AdamW's moments are in bf16: the row says it, or Megatron-Bridge's recipes of these networks do."""
    is_recipe = re.search(r"bridge", raw.get("framework", ""), re.I) and re.search(
        r"deepseek.{0,3}v3|moonlight", row.network.name, re.I
    )
    return bool(is_recipe or re.search(r"bf16 moments", raw.get("zero_stage", ""), re.I))


def peak(row: Row, *, pipeline_rank: int | None = None) -> Memory:
    """Return what is predicted for ``row``: of its fullest rank, or of one pipeline rank."""
    return memory(
        row.network, row.workload, row.machine.card, row.engine, row.candidates,
        pipeline_rank=pipeline_rank, imbalance=row.imbalance,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run fits its card: by the bytes predicted, and by both ends of their 80 % interval."""

    fits: bool
    fits_at_most: bool
    """Even if it needs as much as the upper end."""
    fits_at_least: bool
    """At least if it needs as little as the lower end."""


def verdict(raw: Mapping[str, str], row: Row) -> Verdict:
    """Return whether the run fits its card; raise Unclear where that depends on what the row leaves out.

    Of a card that comes with two sizes of memory, and no word of which, the larger one is taken.
    """
    found = peak(row)
    for other in _other_readings(raw, row):
        if peak(other).fits[0] != found.fits[0]:
            raise Unclear("it does not say whether the optimizer is sharded, and that decides whether it fits")
    low, high = (float(end[0]) for end in found.interval(found.needed_bytes))
    limit = found.usable_bytes * (1 - found.margin)
    return Verdict(bool(found.fits[0]), high <= limit, low <= limit)


def _other_readings(raw: Mapping[str, str], row: Row) -> list[Row]:
    """Frameworks of Megatron's family may shard the optimizer or not; by default each is read as it mostly ran."""
    c = row.candidates
    is_said = raw.get("zero_stage", "").strip() or "distributed" in raw.get("optimizer", "").lower()
    if is_said or row.engine.name not in ("megatron", "megatron-2021", "megatron-deepspeed") or int(c.zero[0]) > 1:
        return []
    ranks = c.data_ranks
    one = np.ones_like(ranks)
    zero = 1 - c.zero
    replicate, shard = (one, ranks) if int(zero[0]) else (ranks, one)
    return [replace(row, candidates=replace(c, zero=zero, dp_replicate=replicate, dp_shard=shard))]


def printed_rank(row: Row) -> int | None:
    """Return the pipeline rank whose memory a row prints; None is the fullest.

    BigScience's notes on 1.3B parameters print what the first server shows: half a GiB more for each sequence of a
    microbatch, which is one layer's activations, where the last stage's logits alone would be more than one.
    """
    return 0 if re.search(r"bigscience.1\.3b", row.network.name, re.I) else None


def printed(raw: Mapping[str, str], row: Row) -> Printed:
    """Return which bytes the row's memory are."""
    if row.set.startswith(("bigscience", "oneflow", "small")):
        return "device"
    return "reserved" if row.engine.family == "fsdp" or row.set.startswith(("papers", "nanotron")) else "allocated"


def predicted_bytes(memory: Memory, which: Printed) -> float:
    """Return the predicted bytes that a row printing ``which`` is compared with."""
    by_name = {
        "allocated": memory.allocated_bytes, "reserved": memory.reserved_bytes, "device": memory.device_bytes,
    }  # fmt: skip
    return float(by_name[which][0])


def measured_peak_bytes(raw: Mapping[str, str]) -> float | None:
    """Return the printed bytes; sources print GiB, some of them as GB."""
    try:
        value = float(raw.get("peak_memory_gb", ""))
    except ValueError:
        return None
    return value * _GIB if 0 < value < 1e4 else None


def ran_out(raw: Mapping[str, str]) -> bool:
    """Return whether the run ended for lack of memory."""
    return raw.get("oom", "").strip().lower() in ("y", "yes", "true", "1")


def _microbatches_of_torchtitan(raw: Mapping[str, str], c: Candidates) -> Candidates:
    """It cuts the batch of a data rank into as many microbatches as there are stages, unless told otherwise."""
    if raw.get("micro_batch", "").strip() or int(c.pp[0]) == 1:
        return c
    local = int(c.sequences_per_microbatch[0] * c.microbatches[0])
    microbatches = max(min(int(c.pp[0]), local), 1)
    each = max(local // microbatches, 1)
    return replace(c, microbatches=np.array([microbatches]), sequences_per_microbatch=np.array([each]))
