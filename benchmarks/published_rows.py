"""What does a row of published runs say, in the planner's own values? Or why can it not be understood?

Only columns that describe a run are read here. What was measured is read in ``measured_step_s`` and its like, which
``planner_accuracy`` calls after all predictions are fixed.
"""

import csv
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.published_machines import card_of, machine_of
from benchmarks.published_networks import Unclear, network_of_row
from triax.plan import candidates as bits
from triax.plan.candidates import SCHEDULE_NAMES, Candidates
from triax.plan.engine import Engine, engine
from triax.plan.hardware import Machine
from triax.plan.memory.activations import IMBALANCE
from triax.plan.network import Network
from triax.plan.workload import Recipe, Workload, precision

MEASURED: Final = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct", "step_time_s", "peak_memory_gb", "oom")
OVERLAPPED: Final = 0.8
"""Part of the products' time beside which tensor parallelism's traffic runs where it overlaps (*assumed*)."""
_ENGINES: Final = (
    (r"megatron.{0,3}deepspeed|megatron \+ deepspeed", "megatron-deepspeed"),
    (r"zero-?bubble|megascale", "megatron"),
    (r"torchtitan|automodel|olmo|torchtune|meta internal|fsdp2", "torchtitan"),
    (r"composer|llm-foundry|fsdp|litgpt|lightning|axolotl|accelerate", "fsdp1"),
    (r"jax|maxtext|paxml", "jax"), (r"nanotron", "nanotron"), (r"oneflow|libai", "oneflow"),
    (r"colossal", "colossalai"), (r"nemo|bridge|megatron-core|primus|megatron", "megatron"),
    (r"internevo|deepspeed", "deepspeed"),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One published run, its measurements left out."""

    id: str
    set: str
    network: Network
    workload: Workload
    machine: Machine
    engine: Engine
    candidates: Candidates
    stack: str
    """The framework as the row names it, without punctuation: what its calibration is kept by."""
    release: str
    """Year of the source, or the release that it names."""
    kind: str
    """dense, dense-narrow (8 or 4 bits), moe."""
    config: str
    """Equal for rows of one configuration, whatever the release or precision."""
    arena: str
    """Equal for rows that differ by layout alone."""
    quality: str
    imbalance: float
    """Tokens of the busiest experts over the mean."""


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file; a value that is missing is an empty text."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: (value or "").strip() for key, value in row.items() if key} for row in csv.DictReader(file)]


def understood(raw: Mapping[str, str]) -> Row:
    """Return what a row describes; raise Unclear with the reason where it cannot be understood."""
    row = {key: "" if key in MEASURED else value for key, value in raw.items()}

    def number(name: str) -> int | None:
        try:
            value = float(row.get(name, "").replace(",", ""))
        except ValueError:
            return None
        return int(value) if math.isfinite(value) and 0 < value < 1e15 else None

    network = network_of_row(row, number)
    card = card_of(row.get("gpu", ""))
    cards = number("n_gpus")
    if cards is None:
        raise Unclear("it does not say how many cards there were")
    seq_len = number("seq_len") or (2048 if re.search(r"gpt-?3|gpt2|bloom", row.get("model", ""), re.I) else None)
    if seq_len is None:
        raise Unclear("it does not say how long sequences were")
    if re.search(r"cpu|offload", row.get("optimizer", ""), re.I):
        raise Unclear("its optimizer runs on the host's processors, which this model of time does not know")
    framework = row.get("framework", "")
    profile = _engine_of(row)
    columns, data_ranks = _degrees(row, number, cards, profile)
    batch = number("global_batch")
    micro = number("micro_batch") or (max(batch // data_ranks // columns["pp"] // 4, 1) if batch else 1)
    if batch is None:
        # A pipeline is not run with so few microbatches that it mostly waits.
        batch = micro * data_ranks * (8 * columns["pp"] if columns["pp"] > 1 else 1)
    micro = max(min(micro, batch // data_ranks), 1)
    microbatches = max(round(batch / (data_ranks * micro)), 1)
    if batch < data_ranks / 2:
        raise Unclear(f"{batch} sequences a step are too few for {data_ranks} data ranks")
    recipe = _recipe(row, card.peak_fp8 > 0)
    lora = 16 if re.search(r"lora", row.get("model", "") + row.get("precision", ""), re.I) else 0
    recompute = _recompute(row, network)
    others = re.search(r"VP printed as NA in this tag \((\d+) in the others", row.get("notes", ""))
    virtual = int(others[1]) if others else number("virtual_pp")
    schedule = _schedule(row, columns["pp"], virtual, network.layers)
    candidates = Candidates.of(
        **columns, **recompute, schedule=SCHEDULE_NAMES.index(schedule[0]), stages_per_rank=schedule[1],
        sequences_per_microbatch=micro, microbatches=microbatches,
    )  # fmt: skip
    machine = machine_of(card, row.get("interconnect", ""), cards, number("gpus_per_node"))
    workload = Workload(
        batch,
        seq_len,
        precision(recipe),
        optimizer="muon" if "muon" in row.get("optimizer", "").lower() else "adamw",
        lora_rank=lora,
    )
    narrow = workload.precision.is_quantised
    kind = "moe" if network.experts is not None else "dense-narrow" if narrow else "dense"
    group = row.get("source_group") or row.get("source", "").split(":")[0]
    arena = "|".join(
        (network.name, card.name, str(cards), str(seq_len), str(batch), framework, recipe, _release(row), str(lora))
    )
    layout = "|".join(f"{name}={value}" for name, value in sorted({**columns, "mbs": micro, "v": schedule[1]}.items()))
    return Row(
        id=row.get("id", ""), set=f"{group}/{kind}", network=network, workload=workload, machine=machine,
        engine=profile, candidates=candidates, stack=_stack(framework), release=_release(row), kind=kind,
        config=f"{network.name}|{card.name}|{cards}|{seq_len}|{batch}|{layout}", arena=arena,
        quality=row.get("quality", ""), imbalance=_imbalance(row),
    )  # fmt: skip


def measured_step_s(raw: Mapping[str, str], row: Row) -> float | None:
    """Return the measured seconds of a step: as printed, or from tokens per second and card."""
    printed, rate = positive(raw.get("step_time_s", "")), positive(raw.get("tokens_per_s_per_gpu", ""))
    if printed is not None:
        return printed
    return None if rate is None else row.workload.tokens_per_step / (rate * float(row.candidates.world_size[0]))


def positive(text: str) -> float | None:
    """Return the number that a cell holds; None where it is empty, no number, not finite or not above zero."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _imbalance(row: Mapping[str, str]) -> float:
    """1 where the router was made to balance, or where experts drop what is over the mean."""
    is_forced = re.search(r"force[d-]?.?balanc|forced balance", row.get("notes", ""), re.I)
    return 1.0 if _is_capped(row) or is_forced else IMBALANCE


def _is_capped(row: Mapping[str, str]) -> bool:
    """Experts take a fixed number of tokens, padded and dropped (NVIDIA's recipe of Grok-1)."""
    return "dgxc" in row.get("source_group", "") and re.search("grok", row.get("model", ""), re.I) is not None


def _release(row: Mapping[str, str]) -> str:
    match = re.search(r"\d{4}(?:-\d{2})?", row.get("source_date", ""))
    return match[0] if match else ""


def _stack(framework: str) -> str:
    return re.sub(r"\(.*?\)|\b[0-9a-f]{7}\b|v?\d[\d.]*|[^a-z+]+", " ", framework.lower()).strip()


def _engine_of(row: Mapping[str, str]) -> Engine:
    framework = row.get("framework", "")
    name = next((name for pattern, name in _ENGINES if re.search(pattern, framework, re.I)), None)
    if name is None:
        raise Unclear(f"its framework is not known: {framework[:60]!r}")
    if (
        name == "megatron"
        and "core" not in framework.lower()
        and re.search(r"a100|v100|ampere", row.get("gpu", ""), re.I)
    ):
        name = "megatron-2021" if not re.search(r"megascale", framework, re.I) else name
    if re.search(r"not stated \(V100", row.get("gpu", "")):
        name = "oneflow" if "LiBai" in framework else "megatron-2021"
    profile = engine(name)
    if row.get("compile") == "n" and profile.norms == "compiled":
        profile = replace(profile, norms="eager", loss="eager")
    if row.get("async_tp") == "y":
        profile = replace(profile, hides_tp=OVERLAPPED)
    if re.search(r"fused|liger", framework, re.I):
        profile = replace(profile, loss="chunked", norms="fused")
    if _is_capped(row):
        profile = replace(profile, waits_for_counts=False)
    if name == "megatron" and re.search(r"nemo|bridge", framework, re.I):
        profile = _of_recipe(profile, row)
    if re.search(r"\bflash", row.get("activation_checkpointing", "")):
        profile = replace(profile, attention="flash")
    return profile


def _of_recipe(profile: Engine, row: Mapping[str, str]) -> Engine:
    """What NVIDIA's recipes say, or a row's notes quote of them: overlap, CUDA graphs, experts' traffic under compute.

    Whole iterations are graphs in the recipes of rack-scale cards from June 2026 on; later rows do not repeat it.
    """
    # Recipes overlap tensor parallelism's traffic, but for DeepSeek's and for 4 bits.
    is_plain = re.search(r"deepseek", row.get("model", ""), re.I) or "fp4" in row.get("precision", "").lower()
    profile = replace(profile, hides_tp=0.0 if is_plain else OVERLAPPED)
    notes = row.get("notes", "")
    is_rack = re.search(r"gb[23]00", row.get("gpu", ""), re.I) is not None
    is_late = _release(row) >= "2026-06" and "mxfp8" in row.get("precision", "")
    is_hybrid = re.search(r"nemotron", row.get("model", ""), re.I) is not None
    is_said = re.search(r"graph_impl': '(\w+)", notes)
    if is_said is None and is_late and is_rack and not is_hybrid:
        return replace(profile, has_cuda_graphs=True, hides_ep=0.6)
    if is_said is None or is_said[1] == "none":
        return profile
    if is_said[1] == "full_iteration":
        return replace(profile, has_cuda_graphs=True, hides_ep=0.6 if "a2a_overlap': True" in notes else 0.0)
    return replace(profile, op_host_s=profile.op_host_s * 0.6)


def _degrees(
    row: Mapping[str, str], number: Callable[[str], int | None], cards: int, profile: Engine
) -> tuple[dict[str, Any], int]:
    """Return the columns of degrees, and how many ranks see different sequences."""
    tp, pp, cp = (number(name) or 1 for name in ("tp", "pp", "cp"))
    others = tp * pp * cp
    if cards % others:
        raise Unclear(f"tp={tp} x pp={pp} x cp={cp} does not divide {cards} cards")
    data_ranks = cards // others
    replicate, shard = number("dp_replicate"), number("dp_shard")
    zero = _zero(row, profile, shard)
    if replicate is None or shard is None or replicate * shard != data_ranks:
        if shard is not None and zero == 3 and data_ranks % shard == 0:
            replicate = data_ranks // shard
        else:
            replicate, shard = (data_ranks, 1) if zero == 0 else (1, data_ranks)
    elif zero in (1, 2) and shard == 1:
        replicate, shard = 1, data_ranks
    elif zero == 0 and shard > 1:
        replicate, shard = data_ranks, 1
    ep = number("ep") or 1
    experts = number("n_experts")
    ep = ep if ep <= data_ranks * cp * tp and (experts is None or ep <= experts) else 1
    etp = _expert_tp(row, profile, tp) if experts is not None else 1
    etp = etp if data_ranks * cp * tp % (ep * etp) == 0 else 1
    sequence_parallel = row.get("sequence_parallel", "")
    is_cut = sequence_parallel.startswith("y") or (not sequence_parallel.startswith("n") and profile.sequence_parallel)
    columns = {
        "pp": pp, "dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": tp, "ep": ep, "etp": etp, "zero": zero,
        "sequence_parallel": int(is_cut),
    }  # fmt: skip
    return columns, data_ranks


def _expert_tp(row: Mapping[str, str], profile: Engine, tp: int) -> int:
    """As printed; else as Megatron-Core has it, tp, but for Megatron-Bridge, whose recipes say 1."""
    said = re.search(r"ETP=(\d+)", row.get("notes", ""))
    if said is not None:
        return int(said[1])
    return 1 if profile.name != "megatron" or re.search(r"bridge", row.get("framework", ""), re.I) else tp


def _zero(row: Mapping[str, str], profile: Engine, shard: int | None) -> int:
    text = row.get("zero_stage", "").lower()
    if re.search(r"shard_grad_op|not resharded|zero-?2", text) or text.startswith("2"):
        return 2
    if text.startswith("3") or "fsdp" in text or "hsdp" in text or "zero3" in text or "zero-3" in text:
        return 3
    if text[:1] in ("0", "1"):
        return int(text[0])
    if "zero-3" in row.get("framework", "").lower():
        return 3
    if "distributed" in row.get("optimizer", "").lower():
        return 1
    if profile.family in ("fsdp", "jax") and (shard or 2) > 1:
        return 3
    return 1 if profile.name == "megatron" else 0


def _recipe(row: Mapping[str, str], has_fp8: bool) -> Recipe:
    text = row.get("precision", "").lower()
    if "nvfp4" in text or "fp4" in text:
        return "nvfp4"
    if "mxfp8" in text:
        return "mxfp8"
    if "fp8" in text or "float8" in text:
        for word, recipe in (("delayed", "fp8_delayed"), ("row", "fp8_rowwise"), ("block", "fp8_blockwise")):
            if word in text:
                return recipe  # type: ignore[return-value]
        if "hybrid" in text or "transformerengine" in text:
            return "fp8_delayed"
        return "fp8_tensorwise"
    if "bf16" in text or "bfloat16" in text:
        return "bf16"
    if "fp16" in text or "float16" in text:
        return "fp16"
    if "fp32" in text or "float32" in text:
        return "fp32"
    return "bf16" if has_fp8 else "fp16"


def _recompute(row: Mapping[str, str], network: Network) -> dict[str, Any]:
    text = row.get("activation_checkpointing", "").lower()
    layers = 0
    match = re.search(r"(\d+) layers per stage", text)
    if match:
        layers = int(match[1])
    if text.startswith("full"):
        return {"recompute": bits.FULL, "recompute_layers": layers}
    offload = re.search(r"offloading of (\d+) layers", text)
    found = 0
    if text.startswith("selective") or "remat" in text:
        words = (
            ("core", bits.CORE_ATTENTION), ("attention", bits.CORE_ATTENTION), ("layernorm", bits.NORMS),
            ("norm", bits.NORMS), ("act", bits.ACTIVATION), ("mla_up", bits.LATENT_UP),
            ("mlp", bits.MLP), ("moe+", bits.EXPERTS), ("shared", bits.SHARED_EXPERTS),
        )  # fmt: skip
        for word, bit in words:
            found |= bit if re.search(rf"(?<![a-z_]){re.escape(word)}|_{re.escape(word)}", text) else 0
        if (
            "sac" in text
            or "per-op" in text
            or "selective recompute" in text
            or "minimal" in text
            or "interval" in text
        ):
            found = bits.SELECTIVE
        found = found or bits.CORE_ATTENTION
    return {"recompute": found, "offload_layers": int(offload[1]) if offload else 0}


def _schedule(row: Mapping[str, str], pp: int, virtual: int | None, layers: int) -> tuple[str, int]:
    text = row.get("pp_schedule", "").lower()
    if pp == 1:
        return "1F1B", 1
    if "zb-1p" in text or text == "zero-bubble":
        return "InterleavedZeroBubble", 1
    if "zb-2p" in text:  # no schedule here is without idle time and has one stage a rank: the nearest is ZB-V
        return "ZBVZeroBubble", 1
    if text.startswith(("v-", "zbv")):
        return "ZBVZeroBubble", 2
    if "dualpipe" in text:
        return "DualPipeV", 2
    if "gpipe" in text:
        return "GPipe", 1
    if virtual is not None and virtual > 1:
        # Embedding and head may be stages of their own; more stages than that is a slip of the row.
        return "Interleaved1F1B", max(min(virtual, (layers + pp) // pp), 1)
    if "interleaved" in text or text.endswith("-i"):
        return "Interleaved1F1B", 2
    return "1F1B", 1
