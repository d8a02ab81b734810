"""What does a training framework do with a layout: what does it keep in memory, what does it hide, what does it cost?

One frozen value a framework; ``engine`` finds it by name. triax's own row describes this project's code. Numbers that
cannot be read from a framework's sources are marked *assumed*.
"""

import difflib
from dataclasses import dataclass, replace
from typing import Final, Literal

from triax.errors import BadInput
from triax.plan.workload import Recipe

Attention = Literal["flash", "materialised"]
"""materialised: scores of all pairs of positions are written to memory."""
Norms = Literal["eager", "fused", "compiled"]
"""How element-wise work runs: an operator each, fused kernels by hand (Apex, Transformer Engine), or compiled."""
Loss = Literal["eager", "fused", "vocab_parallel", "chunked"]
"""How logits become a loss: in fp32 copies, in place, in place over cut vocabularies, or never all at once."""
Family = Literal["fsdp", "megatron", "deepspeed", "jax", "triax"]
"""Frameworks of one family share code, and so their calibration."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What a framework does. Bytes are per number."""

    name: str
    family: Family
    recipes: tuple[Recipe, ...]
    axes: tuple[str, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    """Axes that it can cut."""
    context_doubt: float = 0.0
    """By which part the time of a layout with cp may be further off than that of others: nobody measured one."""

    # Memory. The moments and the master copy are the optimizer's business, see ``triax.plan.memory``.
    holds_low_precision_weights: bool = True
    """Weights are kept in the compute type beside fp32 masters; else the fp32 shards are all there is (FSDP)."""
    moment_bytes: float | None = None
    """Bytes of both of AdamW's moments; absent means in fp32 (Megatron's precision-aware optimizer: 4, in bf16)."""
    grad_bytes: int = 4
    """Bytes of a gradient as it is kept between microbatches."""
    grad_reduce_bytes: int = 4
    """Bytes of a gradient on the wire."""
    zero1_keeps_grads_whole: bool = True
    """ZeRO-1 reduces gradients at the end of a step and keeps them whole until then."""
    bucket_padding: int = 1
    """A shard is rounded up to a multiple of this many numbers (Megatron: lcm(dp, 128))."""
    prefetch: int = 1
    """Units gathered ahead of the one that computes, under ZeRO-3."""
    vocab_padding: int = 1
    """The vocabulary is rounded up to a multiple of this times tp; 1: it is not."""
    keeps_context_copy: bool = False
    """What attention returns is kept in two orders of dims (FlashAttention-2 under a sequence-first network)."""
    makes_attention_mask: bool = False
    """A byte for each pair of positions comes with every batch (Megatron's data loader)."""
    widens_norms: bool = False
    """A norm keeps its input in fp32 beside the compute type, where it is no fused kernel."""
    keeps_gathered: bool = False
    """What tensor parallelism gathers along the sequence is kept for the backward, not gathered again."""
    holds_sent: bool = False
    """What pipeline stages send and receive is held for all microbatches, until the schedule ends."""
    splits_whole: bool = False
    """A split backward keeps what its stage saved or made again, and gradients of outputs, until its second part."""
    gathers_once_in_pipeline: bool = False
    """With pipeline parallelism ZeRO-3 gathers weights and reduces gradients once a step, as ZeRO-1 does."""
    narrow_weights: bool = False
    """Recipes in 8 or 4 bits keep weights in those alone, beside the fp32 masters."""
    grouped_gemm_streams: int = 0
    """Streams of the experts' products, each with scratch space of its own."""
    weights_expert_activations: bool = False
    """The router's weights multiply what enters an expert's second matrix; without a gate that is no fused kernel."""
    weighs_expert_outputs: bool = False
    """The router's weights multiply what comes back from experts, which is kept for that."""
    sends_each_choice: bool = False
    """A token is sent once for each of its experts, not once to each rank that has some of them."""
    waits_for_counts: bool = True
    """The host reads how many tokens each expert has before it goes on, so that a layer's work waits to be launched."""
    gathers_narrow: tuple[Recipe, ...] = ()
    """Recipes of 8 or 4 bits under which what tensor parallelism gathers is quantised before it is sent."""
    expert_load: float = 1.0
    """Tokens of the busiest rank's experts over the mean, as times see it: 1 where published runs force a balance."""
    has_transformer_engine: bool = False
    """Its scratch space is there besides PyTorch's."""
    loss_bytes: float | None = None
    """Bytes a logit, of two bytes, at the peak of the loss; absent means as the kind of loss takes."""
    keeps_outputs: int = 0
    """Microbatches whose logits in fp32 the last stage never lets go: a pipeline's buffers of outputs that only the
    next microbatch overwrites (DeepSpeed has two)."""
    deferred_logit_gradients: float = 0.0
    """Gradients of logits, of microbatches passed, that wait for the head's weight gradient at the end of a step."""
    cublas_workspace_bytes: float | None = None
    """Scratch space of matrix products of one thread; absent means PyTorch's default for the card."""
    loss: Loss = "fused"
    bucket_bytes: float = 0.0
    """Buffers that gather weights and reduce gradients, of a size of their own: at the end of a step up to ZeRO-1."""
    allocator_overhead: float = 1.05
    """Bytes reserved by the allocator over bytes allocated."""
    reports: Literal["allocated", "reserved"] = "allocated"
    """Which of the two the framework prints as its memory."""
    memory_spread: float = 0.03
    """Half of the 80 % interval over the bytes, dense networks; with experts three times it."""
    memory_margin: float = 0.03
    """Part of the card's memory that a plan leaves free, dense networks; with experts three times it (assumed)."""

    # Time.
    attention: Attention = "flash"
    has_own_attention: bool = False
    """Fused attention is written for the card's generation (cuDNN, FlashAttention-3), not for Ampere's."""
    norms: Norms = "fused"
    sequence_parallel: bool = True
    """Tensor parallelism cuts norms and residuals along the sequence, as far as a layout does not say otherwise."""
    op_host_s: float = 4e-6
    """Time of the host to launch one operator."""
    ops_per_layer: int = 60
    """Operators of one layer, forward and backward, as the host launches them."""
    has_cuda_graphs: bool = False
    selective_matmul_again: float = 0.0
    """Part of the linear layers that selective recomputation repeats: torchtitan keeps every second product."""
    hides_tp: float = 0.0
    """Part of matrix products' time that tensor parallelism's traffic may run beside (user buffers, async TP)."""
    hides_dp: float = 1.0
    """Part of the data axes' traffic that may run under forward and backward."""
    hides_ep: float = 0.0
    hides_pp: float = 1.0
    reduces_each_microbatch: bool = False
    """Gradients are reduced after each microbatch, not once a step."""
    comm_sms: int = 8
    """Streaming multiprocessors that collectives take from compute while both run."""


_FP8: Final[tuple[Recipe, ...]] = ("fp8_delayed", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4")
_HALF: Final[tuple[Recipe, ...]] = ("fp32", "bf16", "fp16")

_TRIAX: Final = Engine(
    name="triax",
    family="triax",
    recipes=("fp32", "fp64", "bf16"),
    context_doubt=0.10,  # assumed; as of a card that nobody measured
    holds_low_precision_weights=False,
    zero1_keeps_grads_whole=True,
    loss="chunked",
    widens_norms=True,
    keeps_gathered=True,
    holds_sent=True,
    splits_whole=True,
    weighs_expert_outputs=True,
    sends_each_choice=True,
    expert_load=1.3,  # as memory has it, ``triax.plan.memory.activations.IMBALANCE``
    allocator_overhead=1.08,
    norms="eager",
    op_host_s=8e-6,
    ops_per_layer=110,
    reduces_each_microbatch=True,
    comm_sms=16,
)
_MEGATRON: Final = Engine(
    name="megatron",
    family="megatron",
    recipes=_HALF + _FP8,
    bucket_padding=128,
    vocab_padding=128,
    weights_expert_activations=True,
    makes_attention_mask=True,
    grouped_gemm_streams=4,
    has_transformer_engine=True,
    has_own_attention=True,
    gathers_narrow=_FP8,
    loss="vocab_parallel",
    allocator_overhead=1.04,
    memory_spread=0.015,
    op_host_s=4e-6,
    comm_sms=16,
)
_MEGATRON_LM_2021: Final = replace(
    _MEGATRON,
    name="megatron-2021",
    memory_spread=0.05,
    recipes=_HALF,
    axes=("pp", "dp_replicate", "tp"),
    grad_bytes=4,
    grad_reduce_bytes=2,
    bucket_padding=1,
    has_transformer_engine=False,
    gathers_narrow=(),
    loss_bytes=10.0,  # exponentials beside the logits in fp32
    attention="materialised",
    sequence_parallel=False,
    hides_dp=0.0,
)
_MEGATRON_DEEPSPEED: Final = replace(
    _MEGATRON_LM_2021,
    name="megatron-deepspeed",
    family="deepspeed",
    axes=("pp", "dp_replicate", "dp_shard", "tp"),
    grad_bytes=6,  # its bf16 optimizer keeps gradients in bf16 and sums them in fp32
    keeps_outputs=2,
    bucket_bytes=2e9,  # 5e8 numbers gathered and as many reduced at once, by default
    allocator_overhead=1.32,
    memory_margin=0.15,
    memory_spread=0.1,
    op_host_s=34e-6,
)
_FSDP1: Final = Engine(
    name="fsdp1",
    family="fsdp",
    recipes=_HALF + _FP8[:1],
    axes=("dp_replicate", "dp_shard"),
    holds_low_precision_weights=False,
    zero1_keeps_grads_whole=False,
    loss="eager",
    loss_bytes=4.0,  # llm-foundry's cross-entropy writes the gradient over the logits
    allocator_overhead=1.06,
    memory_spread=0.1,
    norms="eager",
    op_host_s=8e-6,
    ops_per_layer=90,
    reduces_each_microbatch=True,
    comm_sms=16,
)
_TORCHTITAN: Final = replace(
    _FSDP1,
    name="torchtitan",
    recipes=(*_HALF, "fp8_tensorwise", "fp8_rowwise", "mxfp8"),
    axes=("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"),
    gathers_narrow=("fp8_tensorwise",),
    gathers_once_in_pipeline=True,
    loss_bytes=None,
    allocator_overhead=1.05,
    memory_spread=0.15,
    reports="reserved",
    norms="compiled",
    selective_matmul_again=0.5,
)
_DEEPSPEED: Final = replace(
    _FSDP1,
    name="deepspeed",
    family="deepspeed",
    recipes=_HALF,
    holds_low_precision_weights=True,
    loss_bytes=None,
    grad_bytes=2,
    grad_reduce_bytes=2,
    prefetch=2,
    op_host_s=15e-6,
)
_JAX: Final = replace(
    _TORCHTITAN,
    name="jax",
    family="jax",
    recipes=_HALF + _FP8[:2],
    gathers_narrow=(),
    has_own_attention=True,
    waits_for_counts=False,  # shapes are fixed when a program is compiled
    op_host_s=0.0,
    reports="allocated",
)
_NANOTRON: Final = replace(
    _MEGATRON_LM_2021,
    name="nanotron",
    memory_spread=0.18,
    allocator_overhead=1.12,
    grad_bytes=6,  # in bf16, and summed in fp32
    axes=("pp", "dp_replicate", "cp", "tp", "ep"),
    attention="flash",
    norms="eager",
    sequence_parallel=True,
    grad_reduce_bytes=4,
    op_host_s=8e-6,
    ops_per_layer=90,
)
_ONEFLOW: Final = replace(_MEGATRON_LM_2021, name="oneflow", memory_spread=0.25, op_host_s=1e-6)
_COLOSSALAI: Final = replace(_DEEPSPEED, name="colossalai")
_ENGINES: Final = (
    _TRIAX, _MEGATRON, _MEGATRON_LM_2021, _MEGATRON_DEEPSPEED, _FSDP1, _TORCHTITAN, _DEEPSPEED, _JAX, _NANOTRON,
    _ONEFLOW, _COLOSSALAI,
)  # fmt: skip
ENGINE_NAMES: Final = tuple(each.name for each in _ENGINES)


def engine(name: str) -> Engine:
    """Return the framework called ``name``; raise BadInput with the nearest names if there is none."""
    for each in _ENGINES:
        if each.name == name.lower():
            return each
    near = difflib.get_close_matches(name.lower(), ENGINE_NAMES, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(ENGINE_NAMES)}."
    raise BadInput(f"there is no engine {name!r}: {hint}")
