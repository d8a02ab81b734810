"""Which network does a config.json describe that triax does not train: experts, latent attention, learned positions?

Sizes alone are read, as far as they decide memory and time; what such a network computes with them is not checked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from triax.errors import BadInput
from triax.plan.network import Experts, LatentAttention, Network
from triax.spec.json_object import JsonObject

_ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("experts_per_token", "moe_top_k", "num_experts_per_token"),
}
"""Other names of a key, after its own."""
WIDE_KEYS: Final = (
    *_ALIASES, *(alias for aliases in _ALIASES.values() for alias in aliases), "kv_lora_rank", "q_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size", "shared_expert_intermediate_size",
    "n_shared_experts", "first_k_dense_replace", "decoder_sparse_step", "num_nextn_predict_layers", "sliding_window",
)  # fmt: skip
"""Keys that are read here, besides those of families that triax trains."""
_MOST: Final = {
    "num_hidden_layers": 1 << 14,
    "num_attention_heads": 1 << 16,
    "num_experts": 1 << 16,
    "hidden_size": 1 << 20,
}
"""Far above any model; other sizes end at ``_LARGEST``. They keep a slip of the pen from filling the memory."""
_LARGEST: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class _Kind:
    """What no key of a ``model_type`` says."""

    is_gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norms_per_layer: int = 2
    has_bias: bool = False
    """Biases on every matrix."""
    has_qkv_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    is_tied: bool = False
    has_learned_positions: bool = False
    ffn_is_experts: bool = False
    """``intermediate_size`` is that of an expert."""
    alternates_window: bool = False
    """Every other layer sees a window."""


_GPT: Final = _Kind(is_gated=False, norm="layer", has_bias=True, is_tied=True, has_learned_positions=True)
_KINDS: Final[Mapping[str, _Kind]] = {
    "mixtral": _Kind(ffn_is_experts=True),
    "phimoe": _Kind(ffn_is_experts=True, norm="layer"),
    "olmoe": _Kind(ffn_is_experts=True, qk_norm="full"),
    "granitemoe": _Kind(ffn_is_experts=True, is_tied=True),
    "gpt_oss": _Kind(ffn_is_experts=True, has_bias=True, alternates_window=True),
    "qwen2_moe": _Kind(has_qkv_bias=True),
    "qwen3_moe": _Kind(qk_norm="head"),
    "glm4_moe": _Kind(has_qkv_bias=True),
    "deepseek_v2": _Kind(),
    "deepseek_v3": _Kind(),
    "kimi_k2": _Kind(),
    "gemma": _Kind(is_tied=True),
    "gemma2": _Kind(is_tied=True, norms_per_layer=4, alternates_window=True),
    "gpt2": _GPT,
    "opt": _GPT,
    "gpt_neox": _Kind(is_gated=False, norm="layer", has_bias=True),
    "bloom": _Kind(is_gated=False, norm="layer", has_bias=True, is_tied=True),
}
_DENSE: Final = _Kind()
WIDE_TYPES: Final = tuple(_KINDS)
"""``model_type`` of the networks that are read here and known."""


def network_from_sizes(config: Mapping[str, Any], origin: str) -> Network:
    """Return the network of which ``config`` says the sizes; raise BadInput, beginning with ``origin``, where it lacks
    one or one is nonsense.

    A ``model_type`` that is not in WIDE_TYPES is read as a decoder of the Llama kind.
    """
    said = JsonObject(config, origin)
    kind = _KINDS.get(str(config.get("model_type")), _DENSE)
    hidden, layers = _size(said, "hidden_size"), _size(said, "num_hidden_layers")
    heads = _size(said, "num_attention_heads")
    kv_heads = _size(said, "num_key_value_heads", heads)
    latent = _latent(said)
    if latent is None and heads % kv_heads:
        raise said.fault("num_key_value_heads", f"it must divide num_attention_heads={heads}")
    experts = _experts(said, kind, layers)
    is_of_experts = kind.ffn_is_experts and experts is not None
    ffn = _size(said, "intermediate_size", 4 * hidden if not kind.is_gated or is_of_experts else None)
    window = _window(said)
    return Network(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent is not None else kv_heads,
        head_dim=_head_dim(said, hidden, heads) if latent is None else latent.nope_dim,
        ffn=ffn,
        vocab=_size(said, "vocab_size"),
        is_gated=kind.is_gated,
        is_tied=_flag(said, "tie_word_embeddings", kind.is_tied),
        norm=kind.norm,
        norms_per_layer=kind.norms_per_layer,
        has_qkv_bias=kind.has_bias or kind.has_qkv_bias or _flag(said, "attention_bias", False),
        has_out_bias=kind.has_bias,
        has_mlp_bias=kind.has_bias,
        qk_norm=kind.qk_norm,
        learned_positions=_size(said, "max_position_embeddings") if kind.has_learned_positions else 0,
        window=window,
        windowed_layers=0 if window is None else layers // 2 if kind.alternates_window else layers,
        latent_attention=latent,
        experts=experts,
        mtp_depth=said.count("num_nextn_predict_layers", 0) if said.has("num_nextn_predict_layers") else 0,
        name=str(config.get("model_type") or "llama")[:40],
    )


def longest_of(config: Mapping[str, Any], origin: str) -> int | None:
    """Return the longest sequence that ``config`` names, or None."""
    said = JsonObject(config, origin)
    return _size(said, "max_position_embeddings") if _key(said, "max_position_embeddings") else None


def _key(said: JsonObject, name: str) -> str | None:
    return next((key for key in (name, *_ALIASES.get(name, ())) if said.has(key)), None)


def _size(said: JsonObject, name: str, otherwise: int | None = None) -> int:
    """Return the size called ``name``, under whichever of its names it stands; ``otherwise`` where it is absent."""
    key = _key(said, name)
    if key is None:
        if otherwise is not None:
            return otherwise
        also = f" (also read: {', '.join(_ALIASES[name])})" if name in _ALIASES else ""
        raise BadInput(f"{said.origin}: {name} is missing{also}: a plan needs it; use a whole number of 1 or more.")
    count = said.count(key)
    most = _MOST.get(name, _LARGEST)
    if count > most:
        raise said.fault(key, f"use a number up to {most}")
    return count


def _flag(said: JsonObject, key: str, otherwise: bool) -> bool:
    return said.flag(key) if said.has(key) else otherwise


def _head_dim(said: JsonObject, hidden: int, heads: int) -> int:
    if said.has("head_dim"):
        return said.count("head_dim")
    if hidden % heads:
        raise BadInput(
            f"{said.origin}: num_attention_heads={heads} does not divide hidden_size={hidden}: give head_dim."
        )
    return hidden // heads


def _window(said: JsonObject) -> int | None:
    if not said.has("sliding_window") or said.value("use_sliding_window") is False:
        return None
    return said.count("sliding_window")


def _latent(said: JsonObject) -> LatentAttention | None:
    if not said.has("kv_lora_rank"):
        return None
    return LatentAttention(
        q_rank=said.count("q_lora_rank") if said.has("q_lora_rank") else 0,
        kv_rank=said.count("kv_lora_rank"),
        nope_dim=said.count("qk_nope_head_dim"),
        rope_dim=said.count("qk_rope_head_dim"),
        value_dim=said.count("v_head_dim"),
    )


def _experts(said: JsonObject, kind: _Kind, layers: int) -> Experts | None:
    if _key(said, "num_experts") is None:
        return None
    count = _size(said, "num_experts")
    per_token = _size(said, "num_experts_per_tok")
    if per_token > count:
        raise said.fault(_key(said, "num_experts_per_tok") or "", f"there are {count} experts")
    inner = _size(said, "intermediate_size" if kind.ffn_is_experts else "moe_intermediate_size")
    shared = _size(said, "shared_expert_intermediate_size", 0)
    if said.has("n_shared_experts"):
        shared = said.count("n_shared_experts", 0) * inner
    dense = said.count("first_k_dense_replace", 0) if said.has("first_k_dense_replace") else 0
    if said.has("mlp_only_layers"):
        dense += len(set(said.numbers("mlp_only_layers")))
    step = _size(said, "decoder_sparse_step", 1)
    dense = max(dense, layers - layers // step)
    if dense > layers:
        raise BadInput(f"{said.origin}: {dense} layers without experts of {layers} layers cannot be.")
    return Experts(count=count, per_token=per_token, ffn=inner, shared_ffn=shared, dense_layers=dense)
