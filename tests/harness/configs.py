"""What does the config.json of each family look like, of models small enough for a test?"""

from typing import Any, Final

Config = dict[str, Any]

EAGER: Final[Config] = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""How transformers is asked to compute. Left alone it groups experts, which takes no width but multiples of four."""

_SIZES: Final[Config] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def config(model_type: str, **more: Any) -> Config:
    """Return a small config.json of ``model_type``, with ``more`` keys."""
    head = {"head_dim": 8} if model_type in ("qwen3", "qwen3_moe", "gemma3_text") else {}
    return {"model_type": model_type, **_SIZES, **head, **more}


def stretched(model_type: str, rope_type: str, max_position_embeddings: int = 64, **numbers: Any) -> Config:
    """Return a config.json with a stretched rope in the spelling of transformers 5."""
    rope = {"rope_theta": 10000.0, "rope_type": rope_type, **numbers}
    return config(model_type, max_position_embeddings=max_position_embeddings, rope_parameters=rope)


WINDOWED: Final = "sliding_attention"
FULL: Final = "full_attention"
_SHORT: Final = [1.0, 1.1, 1.3]
_LONG: Final = [1.5, 2.5, 4.0]

GEMMA_ROPE: Final[Config] = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    WINDOWED: {"rope_type": "default", "rope_theta": 10000.0},
}

CONFIGS: Final[dict[str, Config]] = {
    "llama": config("llama"),
    "llama, tied": config("llama", tie_word_embeddings=True),
    "llama, biases": config("llama", attention_bias=True, mlp_bias=True),
    "llama, head of 10": config("llama", head_dim=10),
    "llama, one key/value head": config("llama", num_key_value_heads=1),
    "llama, a head for each query": config("llama", num_key_value_heads=4, hidden_act="gelu_pytorch_tanh"),
    "llama, linear": stretched("llama", "linear", factor=3.0),
    "llama, dynamic": stretched("llama", "dynamic", 16, factor=3.0),
    "llama, llama3": stretched(
        "llama", "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=20
    ),
    "llama, yarn": stretched("llama", "yarn", factor=4.0, original_max_position_embeddings=16),
    "llama, yarn, all numbers": stretched(
        "llama", "yarn", factor=3.0, original_max_position_embeddings=16, beta_fast=1.0, beta_slow=0.3,
        attention_factor=1.3, truncate=False, rope_theta=10.0,
    ),
    "llama, yarn from next to nothing": stretched(
        "llama", "yarn", factor=32.0, original_max_position_embeddings=2, rope_theta=10.0
    ),
    "llama, yarn, scales": stretched(
        "llama", "yarn", factor=40.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.5
    ),
    "llama, longrope, short": stretched(
        "llama", "longrope", original_max_position_embeddings=32, factor=2.0, short_factor=_SHORT, long_factor=_LONG
    ),
    "llama, longrope, long": stretched(
        "llama", "longrope", original_max_position_embeddings=16, factor=3.0, short_factor=_SHORT, long_factor=_LONG
    ),
    "mistral": config("mistral", sliding_window=None),
    "mistral, window": config("mistral", sliding_window=5, head_dim=10),
    "mistral, window and yarn": {
        **stretched("mistral", "yarn", factor=4.0, original_max_position_embeddings=16), "sliding_window": 7,
        "tie_word_embeddings": True,
    },
    "qwen2": config("qwen2"),
    "qwen2, tied, one key/value head": config("qwen2", tie_word_embeddings=True, num_key_value_heads=1),
    "qwen2, window in late layers": config(
        "qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=2, rope_parameters={
            "rope_theta": 1000000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        },
    ),
    "qwen2, window in listed layers": config(
        "qwen2", use_sliding_window=True, sliding_window=3, layer_types=[WINDOWED, FULL, FULL, WINDOWED]
    ),
    "qwen3": config("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
    "qwen3, biases, tied, head of 10": config("qwen3", attention_bias=True, tie_word_embeddings=True, head_dim=10),
    "qwen3, window": config("qwen3", use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "smollm3": config("smollm3", tie_word_embeddings=True),
    "smollm3, biases": config("smollm3", attention_bias=True, mlp_bias=True, no_rope_layers=[1, 0, 0, 1]),
    "smollm3, window": config("smollm3", use_sliding_window=True, sliding_window=5, no_rope_layer_interval=2),
    "smollm3, yarn": stretched("smollm3", "yarn", factor=2.0, original_max_position_embeddings=32),
    "granite": config(
        "granite", embedding_multiplier=12.0, attention_multiplier=0.3, residual_multiplier=0.22, logits_scaling=8.0
    ),
    "granite, biases, tied": config(
        "granite", embedding_multiplier=3, attention_multiplier=0.1, logits_scaling=49, attention_bias=True,
        mlp_bias=True, tie_word_embeddings=True,
    ),
    "phi3": config("phi3"),
    "phi3, window, tied": config("phi3", sliding_window=5, tie_word_embeddings=True),
    "phi3, longrope, long": config(
        "phi3", original_max_position_embeddings=16, rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": _SHORT, "long_factor": _LONG,
            "original_max_position_embeddings": 16, "partial_rotary_factor": 1.0,
        },
    ),
    "phi3, longrope of a part": config(
        "phi3", hidden_size=32, original_max_position_embeddings=32, partial_rotary_factor=0.75, rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": _SHORT, "long_factor": _LONG,
            "original_max_position_embeddings": 32, "partial_rotary_factor": 0.75,
        },
    ),
    "phi3, half a head turns": config(
        "phi3", hidden_size=32, partial_rotary_factor=0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "gemma3": config(
        "gemma3_text", tie_word_embeddings=True, sliding_window=5, query_pre_attn_scalar=7,
        layer_types=[WINDOWED, WINDOWED, FULL, WINDOWED], head_dim=10,
    ),
    "gemma3, biases, untied, linear": config(
        "gemma3_text", sliding_window=9, attention_bias=True, layer_types=[WINDOWED, FULL, WINDOWED, FULL],
        rope_parameters=GEMMA_ROPE, num_key_value_heads=1,
    ),
    "gemma3, all layers see everything": config("gemma3_text", layer_types=[FULL] * 4, query_pre_attn_scalar=6),
    "olmo2": config("olmo2", rms_norm_eps=1e-5),
    "olmo2, biases, tied, one key/value head": config(
        "olmo2", attention_bias=True, tie_word_embeddings=True, num_key_value_heads=1
    ),
    "mixtral": config("mixtral", num_local_experts=6),
    "mixtral, window, tied, all experts": config(
        "mixtral", num_local_experts=3, num_experts_per_tok=3, sliding_window=5, tie_word_embeddings=True, head_dim=10,
        router_aux_loss_coef=0.02,
    ),
    "qwen3_moe": config(
        "qwen3_moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=12, norm_topk_prob=True
    ),
    "qwen3_moe, biases, some layers dense, raw scores": config(
        "qwen3_moe", num_experts=5, num_experts_per_tok=2, moe_intermediate_size=10, attention_bias=True,
        decoder_sparse_step=2, mlp_only_layers=[3], router_aux_loss_coef=0.0, rope_parameters={
            "rope_theta": 1000000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        },
    ),
    "olmoe": config("olmoe", num_experts=6, num_experts_per_tok=2),
    "olmoe, biases, tied, one key/value head": config(
        "olmoe", num_experts=4, num_experts_per_tok=3, norm_topk_prob=True, attention_bias=True,
        tie_word_embeddings=True, num_key_value_heads=1, intermediate_size=14,
    ),
    "qwen3_moe, window, tied": config(
        "qwen3_moe", num_experts=4, num_experts_per_tok=4, moe_intermediate_size=7, use_sliding_window=True,
        sliding_window=4, tie_word_embeddings=True, mlp_only_layers=[0, 2],
    ),
}  # fmt: skip
"""By a name that says what is special; rope in the spelling of transformers 5."""


def in_older_spelling(said: Config) -> Config:
    """Return ``said`` as transformers 4 spelled rope: ``rope_theta`` beside ``rope_scaling``."""
    older = {key: value for key, value in said.items() if key != "rope_parameters"}
    params = dict(said.get("rope_parameters") or {})
    if FULL in params:
        older["rope_local_base_freq"] = params[WINDOWED]["rope_theta"]
        params = dict(params[FULL])
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in params:
            older[key] = params.pop(key)
    if params.get("rope_type", "default") != "default":
        if said["model_type"] != "gemma3_text":  # which is younger than that name
            params["type"] = params.pop("rope_type")
        older["rope_scaling"] = params
    return older
