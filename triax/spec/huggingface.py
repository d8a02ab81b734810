"""How do networks and weights get a Hugging Face folder's names, and back?

The whole of what other rooms need: config.json to ModelSpec (``huggingface_read``) and back, and where in a folder each
weight lies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from triax.errors import BadInput
from triax.spec.faults import shown
from triax.spec.huggingface_experts import COUNT_KEYS, expert_keys, resolved_experts, tensor_names
from triax.spec.huggingface_families import FAMILIES, MATTERS, SIZES, SUPPORTED, Family
from triax.spec.huggingface_read import model_from_config, why_unknown
from triax.spec.huggingface_rope import GLOBAL, LOCAL, resolved_stretch, rope_keys
from triax.spec.legal_values import either
from triax.spec.model import ModelSpec
from triax.spec.weights import weights_table

__all__ = ["SUPPORTED", "Source", "config_of", "model_from_config", "tensor_sources"]

_TOKEN_IDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")

_NOT_CARRIED: Final = frozenset(
    (
        *SIZES,
        *(key for family in FAMILIES.values() for key in family.defaults),
        *(key for matter in MATTERS for key in matter.keys),
        *("model_type", "architectures", "rope_scaling", "rope_parameters", "layer_types", "hidden_act"),
        *("dtype", "torch_dtype", "auto_map", "transformers_version"),
        *COUNT_KEYS,
    )
)
"""Keys that say what a ModelSpec says, or what is no longer true of an exported folder."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a weight, or the next rows of one, lie in a Hugging Face folder."""

    hf_name: str
    first_row: int
    num_rows: int | None
    """None: all of the tensor. Else these rows of it."""


def tensor_sources(model: ModelSpec) -> dict[str, tuple[Source, ...]]:
    """Return where the rows of each weight of the weights table lie, by its name; raise BadInput for an unknown family.

    A weight is one tensor or some rows of one, or, where it holds several experts, as many tensors.
    """
    family = _family_of(model)
    fused = family.fused
    rows_before: dict[str, int] = {}
    sources = {}
    for weight in weights_table(model):
        part = next((part for part in fused if f".{part}." in weight.hf_name), None)
        if part is None:
            names = tensor_names(weight.hf_name, weight.num_experts, family.names)
            sources[weight.name] = tuple(Source(name, 0, None) for name in names)
            continue
        whole = weight.hf_name.replace(part, fused[part])
        first = rows_before.get(whole, 0)
        sources[weight.name] = (Source(whole, first, weight.shape[0]),)
        rows_before[whole] = first + weight.shape[0]
    return sources


def config_of(model: ModelSpec, *, dtype: str, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a config.json that transformers opens to the same network, with weights in ``dtype``.

    ``base`` is the config the model came from: what it says beyond the network, such as token ids, is carried along.
    Rope is written in the spelling of transformers 5 and in that of 4. Raises BadInput where the family of ``model``
    has no way to say one of its settings, naming families that have.
    """
    _family_of(model)
    unsaid = _unsaid(model, model.family)
    if unsaid:
        others = [name for name in SUPPORTED if not _unsaid(model, name)]
        advice = f"set model.family to {either(others)}" if others else "no family that triax knows can"
        raise BadInput(f"a {model.family} of Hugging Face's cannot have {' and '.join(unsaid)}: {advice}.")
    beside: Mapping[str, Any] = dict.fromkeys(_TOKEN_IDS) if base is None else base
    carried = {key: value for key, value in beside.items() if key not in _NOT_CARRIED and not key.startswith("_")}
    return {**_network_keys(model, model.family), "dtype": dtype, "torch_dtype": dtype, **carried}


def _family_of(model: ModelSpec) -> Family:
    if model.family not in FAMILIES:
        raise BadInput(f"model.family = {shown(model.family)} cannot be: {why_unknown(model.family)}.")
    return FAMILIES[model.family]


def _unsaid(model: ModelSpec, name: str) -> list[str]:
    """Return the settings of ``model`` that a config.json of family ``name`` cannot say."""
    family = FAMILIES[name]
    heads, hidden = model.num_attention_heads, model.hidden_size
    if family.heads_divide and hidden % heads:
        return [f"num_attention_heads={heads} that does not divide hidden_size={hidden}"]
    if family.stretches_derived_heads and model.rope_scaling and model.head_width != hidden // heads:
        return [f"a stretched rope with head_dim={model.head_width}, not hidden_size / num_attention_heads"]
    try:
        back = model_from_config(_network_keys(model, name), "")
    except BadInput as refusal:
        return [str(refusal).removeprefix(": ").split("\n")[0].rstrip(".")]
    said, meant = _resolved(back), _resolved(model)
    return [f"{key}={shown(meant[key])}" for key in meant if said[key] != meant[key]]


def _resolved(model: ModelSpec) -> dict[str, Any]:
    """Return the settings of ``model`` so that two that make the same network are equal."""
    is_local = [model.reach(layer) == "local" for layer in range(model.num_hidden_layers)]
    scaling = model.rope_scaling
    local_theta: float | str = model.rope_theta if scaling is None else "as the others, stretched"
    if any(is_local) and model.rope_local_theta is not None:
        local_theta = model.rope_local_theta
    return model.model_dump(exclude={"family"}) | {
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
        "attention_multiplier": _score_scale(model),
        "sliding_window": model.sliding_window if any(is_local) else None,
        "global_layers": [layer for layer, local in enumerate(is_local) if not local] if any(is_local) else [],
        "layers_without_rope": sorted(set(model.layers_without_rope)),
        "rope_scaling": None if scaling is None else resolved_stretch(scaling, model),
        "rope_local_theta": local_theta,
        **resolved_experts(model),
    }


def _score_scale(model: ModelSpec) -> float:
    return model.head_width**-0.5 if model.attention_multiplier is None else model.attention_multiplier


def _network_keys(model: ModelSpec, name: str) -> dict[str, Any]:
    """Return the keys that say the network of ``model`` as far as family ``name`` can."""
    family = FAMILIES[name]
    scale = _score_scale(model)
    own: dict[str, Any] = {
        "attention_multiplier": scale,
        # The scale is one over the root of this whole number, where it is that of such a family.
        "query_pre_attn_scalar": max(round(scale**-2), 1) if scale > 1e-9 else 1,
        "attention_bias": model.attention_bias,
        "hidden_activation": model.hidden_act,
        **_layer_keys(model, family),
    }
    for key in ("mlp_bias", "hidden_act", "embedding_multiplier", "residual_multiplier", "logits_scaling"):
        own[key] = getattr(model, key)
    return {
        "architectures": [family.architecture],
        "model_type": name,
        **{key: getattr(model, key) for key in SIZES},
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
        **{key: getattr(model, key) for key in ("max_position_embeddings", "rms_norm_eps", "initializer_range")},
        "tie_word_embeddings": model.tie_word_embeddings,
        **{key: value for key, value in own.items() if key in family.defaults},
        **expert_keys(model, family),
        **rope_keys(model, family),
    }


def _layer_keys(model: ModelSpec, family: Family) -> dict[str, Any]:
    layers = range(model.num_hidden_layers)
    is_local = [model.reach(layer) == "local" for layer in layers]
    has_window = any(is_local)
    # A family that lists its layers without a switch for windows wants a number even where no layer has one.
    unused = family.defaults["sliding_window"] if "sliding_window_pattern" in family.defaults else None
    return {
        "sliding_window": model.sliding_window if has_window else unused,
        "use_sliding_window": has_window,
        "max_window_layers": is_local.index(True) if has_window else len(layers),
        "layer_types": [LOCAL if local else GLOBAL for local in is_local],
        "no_rope_layers": [int(layer not in model.layers_without_rope) for layer in layers],
    }
