"""Which ModelSpec does a Hugging Face ``config.json`` describe?

``transformers`` is the reference for what its keys mean, and is not needed to read them. What would change the network
and cannot be said by a ModelSpec is refused by name, never left out; keys that change nothing are passed over.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

from triax.errors import BadInput
from triax.spec.faults import shown, validated
from triax.spec.huggingface_experts import expert_settings
from triax.spec.huggingface_families import FAMILIES, MATTERS, REFUSED_TYPES, SIZES, SUPPORTED, Family
from triax.spec.huggingface_rope import GLOBAL, LOCAL, rope_settings
from triax.spec.json_object import JsonObject
from triax.spec.legal_values import either
from triax.spec.model import ModelSpec

_ACTIVATIONS: Final = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}


def model_from_config(config: Mapping[str, Any], origin: str) -> ModelSpec:
    """Return the network that ``config``, the content of a config.json, describes.

    Raises BadInput, each sentence of which begins with ``origin``, for a family that is no setting of the decoder, for
    keys that say something it cannot do, and for values that are missing, of the wrong kind or nonsense.
    """
    name, family = _family(config, origin)
    _refuse_what_matters(config, family, name, origin)
    said = JsonObject(config, origin, defaults=family.defaults)
    sizes = validated(ModelSpec, _sizes(said, name), origin)
    settings = {
        **sizes.model_dump(),
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_width,
        **_options(said),
        **_multipliers(said, sizes),
        **rope_settings(said, family, sizes),
        **_layers(said, sizes),
        **expert_settings(said, family, sizes.num_hidden_layers),
        **family.settings,
    }
    return validated(ModelSpec, settings, origin)


def _family(config: Mapping[str, Any], origin: str) -> tuple[str, Family]:
    """Return the family by ``model_type``, or by ``architectures`` where there is no type."""
    said = JsonObject(config, origin)
    architectures = said.words("architectures") if said.has("architectures") else ()
    by_architecture = {family.architecture.lower(): name for name, family in FAMILIES.items()}
    named = [by_architecture.get(architecture.lower()) for architecture in architectures]
    name = said.value("model_type") or next(filter(None, named), None)
    if not isinstance(name, str):
        raise said.fault("model_type", f"name the architecture, such as {either(SUPPORTED)}")
    if name not in FAMILIES:
        raise BadInput(f"{origin}: model_type = {shown(name)} cannot be: {why_unknown(name)}.")
    if architectures and name not in named:
        raise said.fault("architectures", f"of model_type {name}, {FAMILIES[name].architecture} alone is read")
    return name, FAMILIES[name]


def why_unknown(name: str) -> str:
    """Return why no family is called ``name``, and which there are, as the end of a sentence."""
    known = f"triax reads {either(SUPPORTED)}"
    if reason := REFUSED_TYPES.get(name):
        return f"{reason}; {known}"
    near = get_close_matches(name[:80].lower(), SUPPORTED, n=2, cutoff=0.6)
    return f"no such architecture is read; the nearest is {either(near)}" if near else f"{known}, and no such one"


def _refuse_what_matters(config: Mapping[str, Any], family: Family, name: str, origin: str) -> None:
    """Raise BadInput, a line for each key, where the config sets what this family does not read."""
    faults = []
    for matter in MATTERS:
        for key in matter.keys:
            value = config.get(key)
            is_own = key in family.settings and value == family.settings[key]
            is_read = key in family.defaults or key in family.also_read
            if not is_read and not matter.is_neutral(value) and not is_own:
                faults.append(f"{origin}: {key} = {shown(value)} cannot be for model_type {name}: {matter.reason}.")
    if faults:
        raise BadInput("\n".join(faults))


def _sizes(said: JsonObject, name: str) -> dict[str, Any]:
    sizes: dict[str, Any] = {"family": name, **{key: said.count(key) for key in SIZES}}
    for key in ("num_key_value_heads", "head_dim"):
        sizes[key] = said.count(key) if said.has(key) else None
    return sizes | {"max_position_embeddings": said.count("max_position_embeddings")}


def _options(said: JsonObject) -> dict[str, Any]:
    act = "hidden_activation" if "hidden_activation" in said.defaults else "hidden_act"
    activation = said.value(act)
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise said.fault(act, f"use {either(_ACTIVATIONS)}")
    has_bias = "attention_bias" in said.defaults and said.flag("attention_bias")
    return {
        "hidden_act": _ACTIVATIONS[activation],
        "rms_norm_eps": said.number("rms_norm_eps"),
        "initializer_range": said.number("initializer_range"),
        "tie_word_embeddings": said.flag("tie_word_embeddings"),
        "attention_bias": has_bias,
        "attention_out_bias": has_bias,
        "mlp_bias": "mlp_bias" in said.defaults and said.flag("mlp_bias"),
    }


def _multipliers(said: JsonObject, sizes: ModelSpec) -> dict[str, Any]:
    if "query_pre_attn_scalar" in said.defaults:
        return {
            "embedding_multiplier": sizes.hidden_size**0.5,
            "attention_multiplier": said.count("query_pre_attn_scalar") ** -0.5,
        }
    keys = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    return {key: said.number(key) for key in keys if key in said.defaults}


def _layers(said: JsonObject, sizes: ModelSpec) -> dict[str, Any]:
    """Return what differs from layer to layer: which have a window, which know no positions."""
    has_rope = _turning(said, sizes.num_hidden_layers)
    window = _window(said)
    reaches = _implied_reaches(said, window, has_rope)
    if said.has("layer_types"):
        listed = said.words("layer_types", GLOBAL, LOCAL)
        if len(listed) != len(has_rope):
            raise said.fault("layer_types", f"there are {len(has_rope)} layers, and it names {len(listed)}")
        if "layer_types" not in said.defaults and list(listed) != reaches:
            raise said.fault("layer_types", "all layers of this family see the same")
        reaches = list(listed)
    if LOCAL not in reaches:
        window, reaches = None, []
    elif window is None:
        raise said.fault("sliding_window", f"layers of {LOCAL} need one, and use_sliding_window true where it is a key")
    return {
        "sliding_window": window,
        "global_layers": tuple(layer for layer, reach in enumerate(reaches) if reach == GLOBAL),
        "layers_without_rope": tuple(layer for layer, turns in enumerate(has_rope) if not turns),
    }


def _window(said: JsonObject) -> int | None:
    """Return the window of layers that have one. Whether it is used may stand in another key."""
    is_used = said.flag("use_sliding_window") if said.has("use_sliding_window") else True
    if not said.has("sliding_window"):
        return None
    if "sliding_window" not in said.defaults and is_used:
        raise said.fault("sliding_window", "this family has no windows in transformers, so use null")
    if "sliding_window" in said.defaults and "use_sliding_window" not in said.defaults and not is_used:
        raise said.fault(
            "use_sliding_window", "transformers would use the window all the same: use sliding_window null"
        )
    return said.count("sliding_window") if is_used else None


def _implied_reaches(said: JsonObject, window: int | None, has_rope: list[bool]) -> list[str]:
    """Return the kind of each layer as it is where ``layer_types`` does not say it."""
    layers = range(len(has_rope))
    if "sliding_window_pattern" in said.defaults:
        pattern = said.count("sliding_window_pattern")
        return [LOCAL if (layer + 1) % pattern else GLOBAL for layer in layers]
    if window is None:
        return [GLOBAL for _ in layers]
    if "max_window_layers" in said.defaults:
        first = said.count("max_window_layers", 0)
        return [LOCAL if layer >= first else GLOBAL for layer in layers]
    if "no_rope_layers" in said.defaults:
        return [GLOBAL if turns else LOCAL for turns in has_rope]
    return [LOCAL for _ in layers]


def _turning(said: JsonObject, num_layers: int) -> list[bool]:
    """Return for each layer whether it knows positions. In ``no_rope_layers`` 1 means that it does."""
    if "no_rope_layers" not in said.defaults:
        return [True] * num_layers
    if not said.has("no_rope_layers"):
        interval = said.count("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    listed = said.numbers("no_rope_layers")
    if len(listed) < num_layers or not set(listed) <= {0.0, 1.0}:
        raise said.fault(
            "no_rope_layers", f"use a list of {num_layers} numbers, 1 for a layer with rope and 0 for others"
        )
    return [value == 1 for value in listed[:num_layers]]
