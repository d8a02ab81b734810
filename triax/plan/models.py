"""Which model is meant: a name, a config.json or its folder, or plain dimensions?

Every way ends in the same reader of Hugging Face's keys. A network that triax trains comes with the ModelSpec that a
run would have; a wider one (experts, latent attention) with its sizes alone.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from triax.errors import BadInput
from triax.plan.network import Network, network_of
from triax.plan.wide_config import WIDE_KEYS, WIDE_TYPES, longest_of, network_from_sizes
from triax.spec.faults import shown
from triax.spec.huggingface import SUPPORTED, model_from_config
from triax.spec.huggingface_families import FAMILIES, SIZES
from triax.spec.legal_values import either
from triax.spec.model import ModelSpec
from triax.spec.text_file import parse_json, read_text
from triax.units import parse_count

_LARGEST_CONFIG_BYTES: Final = 1 << 22
_PRESETS: Final = Path(__file__).parent / "presets.toml"


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that a plan is made for."""

    name: str
    network: Network
    spec: ModelSpec | None
    """What a run of triax trains; None where it does not train such a network."""
    longest: int | None
    """Tokens of the longest sequence that it is meant for, where it says so."""
    origin: str
    """Where the sizes come from."""
    note: str = ""
    """What was taken for granted while they were read."""


@cache
def _presets() -> Mapping[str, Mapping[str, Any]]:
    return MappingProxyType(tomllib.loads(_PRESETS.read_text(encoding="utf-8"))["models"])


def preset_names() -> tuple[str, ...]:
    """Return the names of all models that need no file."""
    return tuple(_presets())


def find_model(said: str, words: Sequence[str] = ()) -> PlannedModel:
    """Return the model that ``said`` names, with ``key=value`` words put over its sizes.

    ``said`` is the name of a preset, the path of a config.json or of the folder that holds one, or itself a word
    ``key=value``, which then begins plain dimensions. Raises BadInput with the nearest names, or with what is missing.
    """
    if "=" in said and not os.path.exists(said):
        return model_of_sizes(_sizes([said, *words]), "plain dimensions", "the model")
    name = _preset_name(said)
    if name is not None:
        config = {key: None if value == "none" else value for key, value in _presets()[name].items()}
        origin = str(config.pop("from"))
        return model_of_sizes(config | _sizes(words), name, origin)
    if not os.path.exists(said):
        raise _unknown(said)
    path = Path(said)
    file = path / "config.json" if path.is_dir() else path
    config = dict(parse_json(read_text(file, _LARGEST_CONFIG_BYTES), str(file)))
    return model_of_sizes(config | _sizes(words), path.resolve().name.removesuffix(".json"), str(file))


def _preset_name(said: str) -> str | None:
    word = said.strip().lower().replace("_", "-").split("/")[-1]
    short = word.removeprefix("meta-").removesuffix("-hf").removesuffix("-base").removesuffix("-instruct")
    return next((each for each in (word, short) if each in _presets()), None)


def _unknown(said: str) -> BadInput:
    near = get_close_matches(said.lower()[:80], preset_names(), n=3, cutoff=0.4)
    hint = f"did you mean {either(near)}?" if near else f"triax knows {', '.join(preset_names())}."
    return BadInput(
        f"{shown(said)} is no model's name, and no config.json, folder or run file is there: {hint} "
        f"Sizes can be given as well: hidden_size=4096 num_hidden_layers=32 ..."
    )


def model_of_sizes(config: Mapping[str, Any], name: str, origin: str) -> PlannedModel:
    """Return the model whose sizes stand in ``config`` under Hugging Face's keys; raise BadInput as its reader does."""
    kind = config.get("model_type")
    is_named = name == "plain dimensions" or name.lower() in origin.lower()
    told = origin if is_named else f"{name} ({origin})"
    is_known = kind is None or kind in SUPPORTED or kind in WIDE_TYPES
    has_experts = any(key in config for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    if kind in SUPPORTED or (kind is None and not has_experts and "kv_lora_rank" not in config):
        spec = model_from_config({"model_type": "llama", **_in_own_words(config)}, told)
        network = replace(network_of(spec), name=name)
        return PlannedModel(name, network, spec, spec.max_position_embeddings, origin)
    network = replace(network_from_sizes(config, told), name=name)
    note = "" if is_known else f"model_type {shown(kind)} is unknown here: counted as a decoder of the Llama kind"
    return PlannedModel(name, network, None, longest_of(config, told), origin, note)


def _in_own_words(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with what plain dimensions leave out: a decoder's feed-forward is 8/3 as wide, to 256."""
    said = dict(config)
    hidden = said.get("hidden_size")
    if "model_type" not in said and "intermediate_size" not in said and isinstance(hidden, int) and hidden > 0:
        said["intermediate_size"] = -(-hidden * 8 // 3 // 256) * 256
    said.setdefault("max_position_embeddings", 131072)
    return said


def _sizes(words: Sequence[str]) -> dict[str, Any]:
    """Return what ``key=value`` words say: counts with a unit of 1000, true, false, or plain text."""
    said: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key or not text:
            raise BadInput(f"{shown(word)} is no size: write key=value, such as hidden_size=4096.")
        if key not in _known_keys():
            near = get_close_matches(key[:80].lower(), _known_keys(), n=2, cutoff=0.5)
            hint = f"did you mean {either(near)}?" if near else f"there are {', '.join(sorted(_known_keys()))}."
            raise BadInput(f"{shown(key)} is no size of a model: {hint}")
        said[key] = _value(text.strip())
    return said


@cache
def _known_keys() -> frozenset[str]:
    """Return the keys of a config.json that some family or the reader of sizes knows."""
    families = {key for family in FAMILIES.values() for key in family.defaults}
    return frozenset({*SIZES, *WIDE_KEYS, *families, "model_type"})


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text in ("null", "none"):
        return None
    try:
        return parse_count(text)
    except BadInput:
        pass
    try:
        return float(text)
    except ValueError:
        return text
