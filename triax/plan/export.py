"""How do other frameworks say a layout? Megatron's flags, torchtitan's, DeepSpeed's JSON, accelerate's YAML.

What a framework has no words for is said in a comment, never dropped.
"""

import json
from typing import Any, Final

from triax.errors import BadInput
from triax.plan.case import Case
from triax.spec.layout import Layout
from triax.spec.legal_values import either

TOOLS: Final = ("megatron", "torchtitan", "deepspeed", "accelerate")


def export(case: Case, layout: Layout, tool: str) -> str:
    """Return ``layout`` as ``tool`` reads it; raise BadInput for a tool that is unknown or cannot do it."""
    makers = {"megatron": _megatron, "torchtitan": _torchtitan, "deepspeed": _deepspeed, "accelerate": _accelerate}
    if tool not in makers:
        raise BadInput(f"--export {tool[:40]} cannot be: use {either(TOOLS)}.")
    return makers[tool](case, layout)


def _lines(pairs: list[tuple[str, object]], notes: list[str]) -> str:
    flags = [f"{key} {value}".rstrip() if value != "" else key for key, value in pairs]
    return "\n".join([*(f"# {note}" for note in notes), *(f"{flag} \\" for flag in flags[:-1]), flags[-1]])


def _megatron(case: Case, layout: Layout) -> str:
    notes = [f"Megatron-LM arguments; {layout.world_size} ranks"]
    pairs: list[tuple[str, object]] = [
        ("--tensor-model-parallel-size", layout.tp), ("--pipeline-model-parallel-size", layout.pp),
        ("--context-parallel-size", layout.cp),
    ]  # fmt: skip
    if case.network.experts is not None:
        pairs.append(("--expert-model-parallel-size", layout.ep))
    if layout.tp > 1:
        pairs.append(("--sequence-parallel", ""))
    if layout.stages_per_rank > 1:
        pairs.append(("--num-virtual-stages-per-pipeline-rank", layout.stages_per_rank))
    pairs += [
        ("--micro-batch-size", layout.sequences_per_microbatch),
        ("--global-batch-size", layout.sequences_per_step),
    ]
    pairs.append(("--seq-length", case.workload.seq_len))
    if layout.zero == 1 and layout.dp_shard > 1:
        pairs.append(("--use-distributed-optimizer", ""))
        if layout.dp_replicate > 1:
            pairs.append(("--num-distributed-optimizer-instances", layout.dp_replicate))
    elif layout.zero >= 2:
        sharing = "optim_grads" if layout.zero == 2 else "optim_grads_params"
        pairs += [("--use-megatron-fsdp", ""), ("--data-parallel-sharding-strategy", sharing)]
        pairs += [("--no-gradient-accumulation-fusion", ""), ("--ckpt-format", "fsdp_dtensor")]
    if layout.recompute == "full":
        pairs += [("--recompute-granularity", "full"), ("--recompute-method", "uniform"), ("--recompute-num-layers", 1)]
    elif layout.recompute == "selective":
        modules = "layernorm moe_act" if case.network.experts is not None else "layernorm"
        pairs += [("--recompute-granularity", "selective"), ("--recompute-modules", modules)]
        notes.append("selective recomputation here is of norms and activations; Megatron's modules are near to that")
    if case.workload.precision.recipe == "bf16":
        pairs.append(("--bf16", ""))
    if layout.schedule not in ("1F1B", "Interleaved1F1B", "GPipe"):
        notes.append(f"schedule {layout.schedule} is not Megatron's: it will run 1F1B")
    if layout.order.index("pp") > layout.order.index("dp_shard"):
        pairs.append(("--use-tp-pp-dp-mapping", ""))
    return _lines(pairs, notes)


def _torchtitan(case: Case, layout: Layout) -> str:
    share = layout.sequences_per_microbatch * (layout.microbatches if layout.pp > 1 else 1)
    pairs: list[tuple[str, object]] = [
        ("--parallelism.data_parallel_replicate_degree", layout.dp_replicate),
        ("--parallelism.data_parallel_shard_degree", layout.dp_shard),
        ("--parallelism.context_parallel_degree", layout.cp),
        ("--parallelism.tensor_parallel_degree", layout.tp),
        ("--parallelism.pipeline_parallel_degree", layout.pp),
        ("--parallelism.expert_parallel_degree", layout.ep),
        ("--parallelism.fsdp_reshard_after_forward", "always" if layout.zero == 3 else "never"),
        ("--training.local_batch_size", share),
        ("--training.global_batch_size", layout.sequences_per_step),
        ("--training.seq_len", case.workload.seq_len),
        ("--activation_checkpoint.mode", layout.recompute),
    ]
    if layout.pp > 1:
        pairs.append(("--parallelism.pipeline_parallel_schedule", layout.schedule))
        pairs.append(("--parallelism.pipeline_parallel_microbatch_size", layout.sequences_per_microbatch))
    notes = [f"torchtitan options; {layout.world_size} ranks"]
    if layout.zero == 1:
        notes.append("torchtitan shares gradients too (ZeRO-2) where this layout shares the optimizer's state alone")
    return _lines(pairs, notes)


def _refuse_axes(layout: Layout, tool: str, own: tuple[str, ...]) -> None:
    beyond = [f"{axis}={getattr(layout, axis)}" for axis in ("pp", "cp", "tp", "ep") if getattr(layout, axis) > 1]
    beyond = [each for each in beyond if each.split("=")[0] not in own]
    if beyond:
        plain = " ".join(f"{each.split('=')[0]}=1" for each in beyond)
        raise BadInput(
            f'{tool} has no words for {" ".join(beyond)}: plan with --layout "{plain}", or export to megatron or '
            f"torchtitan."
        )


def _deepspeed(case: Case, layout: Layout) -> str:
    _refuse_axes(layout, "a DeepSpeed configuration", ("tp",))
    share = layout.sequences_per_microbatch * layout.microbatches
    said: dict[str, Any] = {
        "train_batch_size": layout.sequences_per_step,
        "train_micro_batch_size_per_gpu": layout.sequences_per_microbatch,
        "gradient_accumulation_steps": share // layout.sequences_per_microbatch,
        "zero_optimization": {"stage": layout.zero, "overlap_comm": True, "contiguous_gradients": True},
        "gradient_clipping": 1.0,
    }
    said |= {"bf16": {"enabled": True}} if case.workload.precision.recipe == "bf16" else {}
    if layout.dp_replicate > 1 and layout.zero == 3:
        said["zero_optimization"]["mics_shard_size"] = layout.dp_shard
    if layout.tp > 1:
        said["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.recompute != "none":
        said["activation_checkpointing"] = {"partition_activations": False}
    return json.dumps(said, indent=2)


def _accelerate(case: Case, layout: Layout) -> str:
    _refuse_axes(layout, "accelerate", ("tp", "cp"))
    lines = [
        f"# accelerate, {layout.world_size} ranks; gradient_accumulation_steps={layout.microbatches}, "
        f"per-device batch {layout.sequences_per_microbatch} of {case.workload.seq_len} tokens",
        "compute_environment: LOCAL_MACHINE", "distributed_type: FSDP",
        f"mixed_precision: {'bf16' if case.workload.precision.recipe == 'bf16' else 'no'}",
        f"num_machines: {case.machine.servers}", f"num_processes: {layout.world_size}",
        "parallelism_config:", f"  parallelism_config_dp_replicate_size: {layout.dp_replicate}",
        f"  parallelism_config_dp_shard_size: {layout.dp_shard}", f"  parallelism_config_tp_size: {layout.tp}",
        f"  parallelism_config_cp_size: {layout.cp}", "fsdp_config:", "  fsdp_version: 2",
        f"  fsdp_reshard_after_forward: {str(layout.zero == 3).lower()}",
        f"  fsdp_activation_checkpointing: {str(layout.recompute != 'none').lower()}",
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "  fsdp_state_dict_type: SHARDED_STATE_DICT",
    ]  # fmt: skip
    return "\n".join(lines)
