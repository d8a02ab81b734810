"""Is a model found by name, file or sizes, and refused in one sentence where it is none?"""

import json
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.errors import BadInput
from triax.plan.models import find_model, preset_names
from triax.plan.network import network_of
from triax.plan.wide_config import network_from_sizes
from triax.spec.huggingface import config_of

# Parameters as model cards and papers print them, in billions: all, and those of one token where they differ.
PRINTED = {
    "llama-2-7b": (6.74, None),
    "llama-2-70b": (69.0, None),
    "llama-3.1-8b": (8.03, None),
    "llama-3.1-70b": (70.6, None),
    "llama-3.1-405b": (405.9, None),
    "llama-3.2-1b": (1.24, None),
    "llama-3.2-3b": (3.21, None),
    "qwen2.5-0.5b": (0.49, None),
    "qwen2.5-72b": (72.7, None),
    "qwen3-0.6b": (0.6, None),
    "qwen3-32b": (32.8, None),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235.0, 22.0),
    "mistral-7b": (7.25, None),
    "mistral-nemo-12b": (12.2, None),
    "mistral-small-24b": (23.6, None),
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (141.0, 39.0),
    "deepseek-v2": (236.0, 21.0),
    "deepseek-v3": (671.0, 37.0),
    "gpt-oss-20b": (20.9, None),
    "gpt-oss-120b": (116.8, None),
    "gpt3-175b": (174.6, None),
}


@pytest.mark.parametrize("name", PRINTED)
def test_presets_have_the_parameters_that_their_cards_print(name: str) -> None:
    network = find_model(name).network
    total, active = PRINTED[name]
    assert network.parameters / 1e9 == pytest.approx(total, rel=0.012)
    if active is not None:
        assert network.active_parameters / 1e9 == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_read_and_what_triax_trains_has_a_spec(name: str) -> None:
    model = find_model(name)
    assert model.network.name == name
    if model.spec is not None:
        assert network_of(model.spec).parameters == model.network.parameters
    else:
        assert model.network.experts is not None or model.network.learned_positions


@pytest.mark.parametrize("name", [name for name in preset_names() if find_model(name).spec is not None])
def test_both_readers_count_the_same_where_both_can_read(name: str) -> None:
    spec = find_model(name).spec
    assert spec is not None
    config = config_of(spec, dtype="bfloat16")
    wide = network_from_sizes({**config, "attention_bias": False}, "test")
    biases = spec.num_hidden_layers * spec.attention_bias * (wide.query_width + wide.key_width + wide.value_width)
    norms = spec.num_hidden_layers * 2 * spec.head_width * (spec.qk_norm == "head" and wide.qk_norm == "none")
    assert wide.parameters + biases + norms == network_of(spec).parameters


@pytest.mark.parametrize("said", ["Llama-3.1-8B", "meta-llama/Meta-Llama-3-8B", "Qwen/Qwen3-8B-Base", "LLAMA_2_70B-hf"])
def test_names_are_found_as_people_write_them(said: str) -> None:
    assert find_model(said).spec is not None


@pytest.mark.parametrize(
    ("said", "meant"), [("llama-3-9b", "llama-3-8b"), ("deepseekv3", "deepseek-v3"), ("gpt4", "gpt")]
)
def test_an_unknown_name_is_refused_with_the_nearest(said: str, meant: str) -> None:
    with pytest.raises(BadInput, match=f"did you mean .*{meant}"):
        find_model(said)


def test_words_change_sizes() -> None:
    model = find_model("llama-3.1-8b", ["num_hidden_layers=4", "vocab_size=32k"])
    assert (model.network.layers, model.network.vocab, model.network.hidden) == (4, 32000, 4096)
    with pytest.raises(BadInput, match="no size of a model: did you mean num_hidden_layers"):
        find_model("llama-3.1-8b", ["num_hiden_layers=4"])
    with pytest.raises(BadInput, match="write key=value"):
        find_model("llama-3.1-8b", ["wide"])


def test_plain_dimensions() -> None:
    model = find_model("hidden_size=4096", ["num_hidden_layers=32", "num_attention_heads=32", "vocab_size=32000"])
    assert model.network.ffn == 11008
    assert model.network.parameters == find_model("llama-2-7b").network.parameters
    with pytest.raises(BadInput, match="num_hidden_layers is missing"):
        find_model("hidden_size=4096")


def test_a_folder_and_a_file_are_read(tmp_path: Path) -> None:
    config = {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_folder, by_file = find_model(str(tmp_path)), find_model(str(tmp_path / "config.json"))
    assert by_folder.network.parameters == by_file.network.parameters
    assert by_folder.network.experts is not None
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "new_thing", "moe_intermediate_size": 32}))
    assert "new_thing" in find_model(str(tmp_path)).note


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers = '32' cannot be"),
        ({"num_attention_heads": 6}, "does not divide hidden_size"),
        ({"num_key_value_heads": 3}, "it must divide num_attention_heads=4"),
        ({"num_experts_per_tok": 9}, "there are 4 experts"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"vocab_size": -1}, "vocab_size = -1 cannot be"),
        ({"hidden_size": 1 << 50, "head_dim": 16}, "use a number up to"),
    ],
)
def test_sizes_that_are_missing_or_nonsense_are_refused(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    config = {
        "model_type": "phimoe", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(BadInput, match=told):
        find_model(str(tmp_path))


VALUES = st.none() | st.booleans() | st.integers(-5, 200) | st.floats() | st.text(string.printable, max_size=5)
KEYS = st.sampled_from(
    ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "n_embd",
     "num_experts", "num_experts_per_tok", "moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "sliding_window",
     "intermediate_size", "head_dim", "decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace"]
)  # fmt: skip


@given(
    st.dictionaries(KEYS, VALUES | st.lists(VALUES, max_size=2)),
    st.sampled_from(["deepseek_v3", "gpt2", "x", "gpt_oss"]),
)
def test_any_config_is_a_network_or_is_refused(config: dict[str, Any], kind: str) -> None:
    try:
        network = network_from_sizes(config | {"model_type": kind}, "config.json")
    except BadInput as refusal:
        told = str(refusal)
    else:
        assert network.parameters > 0
        return
    assert told.startswith("config.json: ")
