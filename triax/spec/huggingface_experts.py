"""How does a ``config.json`` say experts, and where in a folder do their matrices lie?

Families differ in names: Mixtral calls the width of an expert ``intermediate_size``, and its matrices ``w1``, ``w3``
and ``w2``. In a folder each expert has tensors of its own; in the weights table those of one kind are one weight.
"""

from collections.abc import Mapping
from typing import Any, Final

from triax.spec.huggingface_families import Family
from triax.spec.json_object import JsonObject
from triax.spec.model import ModelSpec

COUNT_KEYS: Final = ("num_local_experts", "num_experts")
"""transformers takes either of them for the number of experts of any family."""

TRAINING_ALONE: Final = frozenset({"router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_speed"})
"""Settings of experts that change how they are trained and no logit: a folder need not say them."""


def expert_settings(said: JsonObject, family: Family, num_layers: int) -> dict[str, Any]:
    """Return the settings of a ModelSpec that say the experts of a config; none where the family has none."""
    count_key = _count_key(family)
    if count_key is None:
        return {}
    own_width = "moe_intermediate_size" in said.defaults
    experts: dict[str, Any] = {
        "num_experts": _count(said, count_key),
        "num_experts_per_tok": said.count("num_experts_per_tok"),
        "moe_intermediate_size": said.count("moe_intermediate_size" if own_width else "intermediate_size"),
        "router_aux_loss_coef": said.number("router_aux_loss_coef"),
    }
    if "norm_topk_prob" in said.defaults:
        experts["norm_topk_prob"] = said.flag("norm_topk_prob")
    if "decoder_sparse_step" in said.defaults:
        step = said.count("decoder_sparse_step")
        listed = said.numbers("mlp_only_layers") if said.has("mlp_only_layers") else ()
        experts["decoder_sparse_step"] = step
        # Those that the step leaves without experts anyway, and those that are not there, say nothing.
        experts["mlp_only_layers"] = [layer for layer in range(step - 1, num_layers, step) if layer in listed]
    return {"experts": experts}


def _count_key(family: Family) -> str | None:
    return next((key for key in COUNT_KEYS if key in family.defaults), None)


def _count(said: JsonObject, usual: str) -> int:
    keys = [key for key in COUNT_KEYS if said.keys.get(key) is not None] or [usual]
    counts = {said.count(key) for key in keys}
    if len(counts) > 1:
        raise said.fault(keys[1], f"{keys[0]} says the same, and says {said.count(keys[0])}")
    return counts.pop()


def expert_keys(model: ModelSpec, family: Family) -> dict[str, Any]:
    """Return the keys that say the experts of ``model`` as far as ``family`` can."""
    count_key = _count_key(family)
    if count_key is None:
        return {}
    if model.experts is None:
        return {count_key: 0}
    experts, step = model.experts, model.experts.decoder_sparse_step
    layers = range(model.num_hidden_layers)
    dense = sorted(set(layers) - set(model.sparse_layers) - {layer for layer in layers if (layer + 1) % step})
    keys = {
        count_key: experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "moe_intermediate_size": experts.moe_intermediate_size,
        "norm_topk_prob": experts.norm_topk_prob,
        "decoder_sparse_step": step,
        "mlp_only_layers": dense,
        "router_aux_loss_coef": experts.router_aux_loss_coef,
    }
    said = {key: value for key, value in keys.items() if key in family.defaults}
    return said if "moe_intermediate_size" in said else said | {"intermediate_size": experts.moe_intermediate_size}


def resolved_experts(model: ModelSpec) -> dict[str, Any]:
    """Return the settings of experts, and of dense layers beside them, so that two that make the same network are
    equal."""
    if model.experts is None:
        return {"experts": None}
    layers = {"first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers"}
    is_dense_anywhere = len(model.sparse_layers) < model.num_hidden_layers
    return {
        "experts": model.experts.model_dump(exclude={*TRAINING_ALONE, *layers}) | {"layers": list(model.sparse_layers)},
        "intermediate_size": model.intermediate_size if is_dense_anywhere else None,
        "mlp_bias": model.mlp_bias if is_dense_anywhere else None,
    }


def tensor_names(hf_name: str, count: int, names: Mapping[str, str]) -> list[str]:
    """Return the tensors of a folder that make up a weight of ``count`` experts, or of one of another kind.

    ``hf_name`` is its name where families agree; ``names`` are those parts of it that a family calls otherwise.
    """
    for part, theirs in names.items():
        if f".{part}" in hf_name:
            renamed = hf_name.replace(part, theirs)
            return [renamed.replace("{expert}", str(expert)) for expert in range(count)]
    return [hf_name]
