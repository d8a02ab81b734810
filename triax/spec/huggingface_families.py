"""Which networks of Hugging Face's are this decoder with other settings, and which keys of theirs matter?

Read off the configuration and model classes of transformers 5.24; a test holds the defaults equal to those classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from triax.spec.rope import Kind

SIZES: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Keys that every config.json has to have, under the names of a ModelSpec."""

_LLAMA_KINDS: Final[tuple[Kind, ...]] = ("linear", "dynamic", "llama3", "yarn", "longrope")

_COMMON: Final[Mapping[str, Any]] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_QWEN: Final[Mapping[str, Any]] = {
    **_COMMON,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

_EXPERT_NAMES: Final[Mapping[str, str]] = {
    f"mlp.experts.{kind}": f"mlp.experts.{{expert}}.{kind}.weight" for kind in ("gate_proj", "up_proj", "down_proj")
}


@dataclass(frozen=True, slots=True)
class Family:
    """One ``model_type``."""

    architecture: str
    defaults: Mapping[str, Any]
    """What transformers takes where config.json does not have the key. A key that is not here is not read."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What makes it this family: settings of a ModelSpec that no key says."""
    rope_kinds: tuple[Kind, ...] = _LLAMA_KINDS
    has_rope_per_reach: bool = False
    """Rope is said twice, for layers that see everything and for layers with a window."""
    fused: Mapping[str, str] = field(default_factory=dict)
    """Weights that are rows of one tensor in the folder, in the order of the weights table."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Parts of names of weights that the folder calls otherwise; ``{expert}`` stands for the number of an expert, each
    of which has tensors of its own there."""
    also_read: tuple[str, ...] = ()
    """Keys that are read besides, without a default."""
    heads_divide: bool = False
    """transformers refuses a ``hidden_size`` that ``num_attention_heads`` does not divide, whatever ``head_dim``."""
    stretches_derived_heads: bool = False
    """transformers counts the factors of a stretch by hidden_size / num_attention_heads, whatever ``head_dim``."""


FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family("LlamaForCausalLM", {**_COMMON, "attention_bias": False, "mlp_bias": False}, heads_divide=True),
    "mistral": Family(
        "MistralForCausalLM",
        {**_COMMON, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN, {"attention_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", {**_QWEN, "head_dim": 128, "attention_bias": False}, {"qk_norm": "head"}),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            **_COMMON,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "rope_theta": 2000000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
    ),
    "granite": Family(
        "GraniteForCausalLM",
        {
            **_COMMON,
            "attention_bias": False,
            "mlp_bias": False,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {
            **_COMMON,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
            "sliding_window": None,
        },
        rope_kinds=("longrope",),
        stretches_derived_heads=True,
        fused={
            "self_attn.q_proj": "self_attn.qkv_proj",
            "self_attn.k_proj": "self_attn.qkv_proj",
            "self_attn.v_proj": "self_attn.qkv_proj",
            "mlp.gate_proj": "mlp.gate_up_proj",
            "mlp.up_proj": "mlp.gate_up_proj",
        },
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            **{key: value for key, value in _COMMON.items() if key != "hidden_act"},
            "hidden_activation": "gelu_pytorch_tanh",
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "attention_bias": False,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "layer_types": None,
        },
        {"norm_placement": "both", "norm_is_offset": True, "qk_norm": "head"},
        has_rope_per_reach=True,
        heads_divide=True,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {**_COMMON, "rms_norm_eps": 1e-5, "attention_bias": False},
        {"norm_placement": "post", "qk_norm": "full"},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {
            **_COMMON,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
        names={
            "mlp.gate.": "block_sparse_moe.gate.",
            "mlp.experts.gate_proj": "block_sparse_moe.experts.{expert}.w1.weight",
            "mlp.experts.up_proj": "block_sparse_moe.experts.{expert}.w3.weight",
            "mlp.experts.down_proj": "block_sparse_moe.experts.{expert}.w2.weight",
        },
        also_read=("num_experts",),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {
            **_COMMON,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "router_aux_loss_coef": 0.001,
        },
        {"qk_norm": "head"},
        names=_EXPERT_NAMES,
        also_read=("num_local_experts",),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {
            **{key: value for key, value in _COMMON.items() if key != "head_dim"},
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.01,
        },
        {"qk_norm": "full"},
        names=_EXPERT_NAMES,
        also_read=("num_local_experts",),
        heads_divide=True,
    ),
}
"""By ``model_type``."""

SUPPORTED: Final[tuple[str, ...]] = tuple(FAMILIES)
"""The ``model_type`` of every family that is read and written."""

_NO_EXPERTS: Final = "this family has no experts: mixtral, qwen3_moe and olmoe have"
_OTHER_SENSES: Final = "it sees or hears besides reading, and triax trains the text part alone, as a folder of its own"
_MEANS: Final = "its norms subtract a mean, which triax's do not"
_LATENT: Final = "its attention compresses keys and values, which triax's does not; its router is a setting of experts"
_STATE_SPACE: Final = "its layers carry a state instead of attending, and triax has attention alone"

REFUSED_TYPES: Final[Mapping[str, str]] = {
    "gemma2": "softcapping of attention scores has no kernel that avoids an S x S matrix of scores",
    "gemma3": f"{_OTHER_SENSES} (model_type gemma3_text)",
    "gemma3n": _OTHER_SENSES,
    "llama4": _OTHER_SENSES,
    "mllama": _OTHER_SENSES,
    "mistral3": _OTHER_SENSES,
    "qwen2_vl": _OTHER_SENSES,
    "qwen2_5_vl": _OTHER_SENSES,
    "qwen3_vl": _OTHER_SENSES,
    "qwen2_moe": "its shared expert has a gate of its own, which triax's has not",
    "granitemoe": "its folder stacks the matrices of all experts in one tensor, which triax does not take apart",
    "phimoe": f"it chooses experts by a threshold near the best score, and {_MEANS}",
    "gpt_oss": "its attention has sinks, and its experts have biases and an activation that is cut off",
    "llama4_text": "it scales what goes into an expert and not what comes out, and attends in chunks",
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "mamba": _STATE_SPACE,
    "mamba2": _STATE_SPACE,
    "jamba": _STATE_SPACE,
    "falcon_h1": _STATE_SPACE,
    "qwen3_next": _STATE_SPACE,
    "gpt2": f"its positions are learned vectors and {_MEANS}",
    "gpt_neox": f"its blocks stand side by side and {_MEANS}",
    "phi": f"its blocks stand side by side and {_MEANS}",
}
"""Well-known others, and why they are no setting of this decoder."""


@dataclass(frozen=True, slots=True)
class Matter:
    """Keys by which some architecture says something that changes the mathematics."""

    keys: tuple[str, ...]
    neutral: tuple[Any, ...]
    """Values, besides null, that change nothing."""
    reason: str

    def is_neutral(self, value: Any) -> bool:
        """Return whether ``value`` changes nothing. True is not 1 here, as it is not in JSON."""
        return value is None or any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in self.neutral
        )


MATTERS: Final[tuple[Matter, ...]] = (
    Matter(
        ("num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts", "moe_num_experts"), (0,),
        _NO_EXPERTS,
    ),
    Matter(
        ("attn_logit_softcapping", "attention_logit_softcapping", "attn_logit_cap"), (), REFUSED_TYPES["gemma2"]
    ),
    Matter(
        ("final_logit_softcapping", "logit_softcapping", "logits_soft_cap"), (),
        "the loss is made from logits as they are, without a cap",
    ),
    Matter(
        ("quantization_config", "compression_config"), (),
        "its weights are quantised: give the folder of the model before it was",
    ),
    Matter(("is_encoder_decoder", "add_cross_attention"), (False,), "triax trains decoders that attend to themselves"),
    Matter(("use_bidirectional_attention", "bidirectional"), (False,), "attention looks back only"),
    Matter(("is_causal",), (True,), "attention looks back only"),
    Matter(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim"), (), "keys and values are not compressed here"),
    Matter(("attention_chunk_size",), (), "attention does not stay inside chunks"),
    Matter(("rope_local_base_freq",), (), "all layers of this family turn alike"),
    Matter(("no_rope_layers", "no_rope_layer_interval"), ([], 0), "all layers of this family know positions"),
    Matter(
        ("partial_rotary_factor", "rotary_pct", "rotary_percent"), (1,), "this family turns every number of a head"
    ),
    Matter(
        ("rope_interleave", "rope_interleaved", "rotary_interleaved", "interleaved_rope"), (False,),
        "rotary embedding pairs the first half of a head with its second",
    ),
    Matter(
        ("alibi", "use_alibi", "use_logn_attn", "use_dynamic_ntk", "attn_temperature_tuning"), (False, 0),
        "positions are rotary alone",
    ),
    Matter(("position_embedding_type",), ("rope",), "positions are rotary alone"),
    Matter(("use_mrope",), (False,), "positions have one dim: that of the text"),
    Matter(("full_attn_mod", "interpolate_factor"), (1,), "this family has no such key in transformers"),
    Matter(
        (
            "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb",
            "embedding_scale",
        ),
        (1,), "this family has no multipliers",
    ),
    Matter(
        (
            "attention_multiplier", "query_pre_attn_scalar", "scale_depth", "dim_model_base", "mup_use_scaling",
            "mup_width_multiplier", "mup_embedding_multiplier", "mup_attn_multiplier",
        ),
        (False,), "this family has no multipliers",
    ),
    Matter(
        ("attention_bias", "mlp_bias", "qkv_bias", "use_qkv_bias", "bias", "use_bias", "lm_head_bias"), (False,),
        "this family has no such biases",
    ),
    Matter(
        ("qk_layernorm", "use_qk_norm", "qk_norm", "use_qkv_norm"), (False,),
        "this family has no norm of queries and keys under that key",
    ),
    Matter(("clip_qkv",), (), "queries, keys and values are not clipped"),
    Matter(
        ("use_parallel_residual", "parallel_residual", "parallel_attn"), (False,),
        "attention and feed-forward stand in a row",
    ),
    Matter(
        ("layer_norm_1p", "layernorm_zero_centered", "zero_centered_norm", "rms_norm_unit_offset"), (False,),
        "this family stores its norms as they are",
    ),
    Matter(
        ("num_kv_shared_layers", "cross_layer_attention", "use_cla", "cla_share_factor"), (False, 0, 1),
        "each layer has its own keys and values",
    ),
    Matter(("per_layer_config", "block_configs", "pruned_heads"), ({}, []), "all layers have the same sizes"),
    Matter(
        ("attn_output_gate", "use_gated_attention", "use_attention_sinks"), (False,), "attention has no gates or sinks"
    ),
    Matter(("vision_config", "audio_config", "text_config"), ({},), _OTHER_SENSES),
)  # fmt: skip
"""Refused where a family that does not read the key sets it: it would be trained as another network in silence.

What changes no logits is not here. Dropout is such: triax has none, whatever ``attention_dropout`` says.
"""
