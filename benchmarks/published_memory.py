"""What does a row of published runs say about memory, beyond what its time needs? Or why can it not be judged?

Which activations are kept, what a framework's recipe keeps of weights and gradients, and which bytes the row prints.
What was measured is read by ``measured_peak_bytes`` and ``ran_out`` alone, after all predictions are fixed.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal

import numpy as np

from benchmarks.published_networks import Unclear
from benchmarks.published_rows import Row
from triax.plan.candidates import Candidates
from triax.plan.memory import Memory

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
