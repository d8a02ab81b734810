"""How does config.json say what a model's rotary positions are? Twice in its history, and differently by family.

Until transformers 4: ``rope_theta`` beside ``rope_scaling`` {``rope_type`` or ``type``, numbers of the stretch}. Since
transformers 5: ``rope_parameters`` with all of it, for gemma3 once for layers that see everything and once for those
with a window. Both are read, as ``modeling_rope_utils`` of transformers 5 reads them, and both are written.
"""

from typing import Any, Final

from triax.spec.huggingface_families import Family
from triax.spec.json_object import JsonObject
from triax.spec.model import ModelSpec
from triax.spec.rope import Kind, RopeScaling

GLOBAL: Final = "full_attention"
LOCAL: Final = "sliding_attention"
"""What ``layer_types`` and ``rope_parameters`` call layers that see everything, and those with a window."""

_NUMBERS: Final[dict[Kind, tuple[str, ...]]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    "longrope": ("factor", "attention_factor"),
}
_NEEDED: Final[dict[Kind, tuple[str, ...]]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": (),
}
_PLAIN: Final = "default"
_STRETCHING: Final = frozenset(RopeScaling.model_fields) - {"original_max_position_embeddings"}
_KNOWN_KEYS: Final = frozenset(RopeScaling.model_fields) | {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned",
}  # fmt: skip


def rope_settings(said: JsonObject, family: Family, sizes: ModelSpec) -> dict[str, Any]:
    """Return the rope settings of a ModelSpec; ``sizes`` is that model without them. Raises BadInput."""
    old, new = said.section("rope_scaling"), said.section("rope_parameters")
    nested = [key for key in (GLOBAL, LOCAL) if key in new.keys]
    local_theta: float | None = None
    if family.has_rope_per_reach:
        if new.keys and not nested:
            raise said.fault("rope_parameters", f"this family says it for {GLOBAL} and {LOCAL} apart")
        local_theta = _plain_theta(new.section(LOCAL), said, family)
        new = new.section(GLOBAL)
    elif nested:
        raise said.fault("rope_parameters", "all layers of this family turn alike, so it is said once")
    spellings = [section for section in (old, new) if section.keys] or [old]
    readings = [_reading(section, said, family, sizes) for section in spellings]
    if readings[0] != readings[-1]:
        raise said.fault("rope_scaling", "rope_parameters says another: say it once, or twice the same")
    return {**readings[0], "rope_local_theta": local_theta}


def _reading(params: JsonObject, said: JsonObject, family: Family, sizes: ModelSpec) -> dict[str, Any]:
    """Return what one of the two spellings says."""
    kind = _kind(params, family)
    partial = 1.0
    if "partial_rotary_factor" in family.defaults:
        partial = _agreed(params, said, "partial_rotary_factor")
    elif params.has("partial_rotary_factor") and params.number("partial_rotary_factor") != 1:
        raise params.fault("partial_rotary_factor", "this family turns every number of a head")
    return {
        "rope_theta": _agreed(params, said, "rope_theta"),
        "partial_rotary_factor": partial,
        "rope_scaling": None if kind is None else _scaling(kind, params, said, family, sizes),
    }


def _plain_theta(params: JsonObject, said: JsonObject, family: Family) -> float:
    if _kind(params, family) is not None:
        raise params.fault("rope_type", "layers with a window are not stretched")
    return _agreed(params, said, "rope_theta", "rope_local_base_freq")


def _agreed(params: JsonObject, said: JsonObject, key: str, outer_key: str | None = None) -> float:
    """Return the number that stands inside the rope's object or beside it. Which is stronger changed with versions of
    transformers, so that they may not differ."""
    outer_key = outer_key or key
    if not params.has(key):
        return said.number(outer_key)
    number = params.number(key)
    if outer_key in said.keys and said.number(outer_key) != number:
        raise params.fault(key, f"{outer_key} = {said.number(outer_key)} stands beside it: say it once, or twice alike")
    return number


def _kind(params: JsonObject, family: Family) -> Kind | None:
    """Return the kind of stretch, None for none. Refuses keys that no kind knows."""
    for key in params.keys:
        if key not in _KNOWN_KEYS and params.has(key):
            raise params.fault(key, "triax knows no such number of a rope")
    key = "rope_type" if "rope_type" in params.keys else "type"
    name = params.keys.get(key, _PLAIN)
    if name == _PLAIN:
        stretching = sorted(_STRETCHING & params.keys.keys())
        if key not in params.keys and stretching:
            raise params.fault("rope_type", f"{stretching[0]} is given, and no kind of stretch")
        return None
    if family.rope_kinds == ("longrope",) and name in ("su", "yarn"):
        return "longrope"  # what phi3 called it at first
    for kind in family.rope_kinds:
        if name == kind:
            return kind
    raise params.fault(key, f"use {', '.join((_PLAIN, *family.rope_kinds))}")


def _scaling(kind: Kind, params: JsonObject, said: JsonObject, family: Family, sizes: ModelSpec) -> dict[str, Any]:
    for key in _NEEDED[kind]:
        if not params.has(key):
            raise params.fault(key, f"{kind} needs it")
    scaling: dict[str, Any] = {"kind": kind, **{key: params.number(key) for key in _NUMBERS[kind] if params.has(key)}}
    if kind in ("dynamic", "linear"):
        return scaling
    original = _original(params, said, sizes)
    scaling["original_max_position_embeddings"] = original
    stretch = sizes.max_position_embeddings / original
    if kind == "yarn":
        scaling.setdefault("factor", stretch)
        # Where rope is said per reach, transformers does not look for it.
        if "truncate" in params.keys and not family.has_rope_per_reach:
            scaling["truncate"] = params.flag("truncate")
    if kind == "longrope":
        scaling |= {key: params.numbers(key) for key in ("short_factor", "long_factor")}
        if scaling.get("factor") == stretch:
            del scaling["factor"]  # it says nothing then, and phi3 of transformers 4 has no such key
    return scaling


def _original(params: JsonObject, said: JsonObject, sizes: ModelSpec) -> int:
    """Return the length before the stretch, which stands inside the rope's object or beside it."""
    key = "original_max_position_embeddings"
    inside = params.count(key) if params.has(key) else None
    beside = said.count(key) if said.has(key) else None
    if inside is not None and beside is not None and inside != beside:
        raise params.fault(key, f"{beside} stands beside it: say it once, or twice alike")
    return beside or inside or sizes.max_position_embeddings


def rope_keys(model: ModelSpec, family: Family) -> dict[str, Any]:
    """Return the keys of config.json for the rope of ``model``, in both spellings, which say the same."""
    scaling = model.rope_scaling
    stretch: dict[str, Any] = {} if scaling is None else _stretch_keys(scaling, model)
    partial = {"partial_rotary_factor": model.partial_rotary_factor}
    params = {"rope_type": _PLAIN, **stretch, "rope_theta": model.rope_theta}
    keys: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_scaling": stretch or None}
    if scaling is not None and scaling.kind == "longrope":
        # transformers 4 knows the length from this place alone.
        keys["original_max_position_embeddings"] = model.unstretched_length
    if "partial_rotary_factor" in family.defaults:
        params |= partial
        keys |= partial
    if family.rope_kinds == ("longrope",) and stretch:
        # phi3 in transformers 4 takes three keys and no more; where there are more, it must not open in silence.
        short = {"type": stretch["rope_type"], **{key: stretch[key] for key in ("short_factor", "long_factor")}}
        has_more = "factor" in stretch or "attention_factor" in stretch
        keys["rope_scaling"] = stretch if has_more else short
    if not family.has_rope_per_reach:
        return {**keys, "rope_parameters": params}
    local_theta = model.rope_theta if model.rope_local_theta is None else model.rope_local_theta
    local = {"rope_type": _PLAIN, "rope_theta": local_theta}
    return {**keys, "rope_local_base_freq": local_theta, "rope_parameters": {GLOBAL: params, LOCAL: local}}


def _stretch_keys(scaling: RopeScaling, model: ModelSpec) -> dict[str, Any]:
    keys: dict[str, Any] = {"rope_type": scaling.kind}
    for key in _NUMBERS[scaling.kind]:
        if (value := getattr(scaling, key)) is not None:
            keys[key] = value
    if scaling.kind not in ("linear", "dynamic"):
        keys["original_max_position_embeddings"] = model.unstretched_length
    if scaling.kind == "yarn":
        keys.setdefault("factor", model.max_position_embeddings / model.unstretched_length)
        keys["truncate"] = scaling.truncate
    if scaling.kind == "longrope":
        keys |= {"short_factor": list(scaling.short_factor), "long_factor": list(scaling.long_factor)}
    return keys


def resolved_stretch(scaling: RopeScaling, model: ModelSpec) -> dict[str, Any]:
    """Return the numbers of a stretch so that two that turn alike are equal."""
    original = model.unstretched_length
    stretch = model.max_position_embeddings / original if scaling.factor is None else scaling.factor
    return _stretch_keys(scaling, model) | {"factor": stretch, "from": original if scaling.kind != "linear" else None}
