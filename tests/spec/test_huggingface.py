"""Is every config.json read as transformers reads it or refused in a sentence, and written back to the same network?"""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.harness.configs import CONFIGS, FULL, GEMMA_ROPE, WINDOWED, Config, config, in_older_spelling, stretched
from tests.spec.published_configs import PUBLISHED
from triax.errors import BadInput
from triax.spec.huggingface import SUPPORTED, Source, config_of, model_from_config, tensor_sources
from triax.spec.huggingface_families import FAMILIES, MATTERS, REFUSED_TYPES
from triax.spec.model import ModelSpec
from triax.spec.weights import num_parameters, weights_table

ORIGIN = "folder/config.json"


def read(said: Config) -> ModelSpec:
    return model_from_config(said, ORIGIN)


def written(model: ModelSpec, base: Config | None = None) -> Config:
    """A config.json, through JSON as it would be on disk."""
    text = json.dumps(config_of(model, dtype="bfloat16", base=base), allow_nan=False)
    said: Config = json.loads(text)
    return said


def refusal(said: Config) -> str:
    with pytest.raises(BadInput) as caught:
        read(said)
    lines = str(caught.value).split("\n")
    assert all(line.startswith(f"{ORIGIN}: ") and line.endswith(".") for line in lines)
    return "\n".join(line.removeprefix(f"{ORIGIN}: ") for line in lines)


def without(said: Config, *keys: str) -> Config:
    return {key: value for key, value in said.items() if key not in keys}


# What transformers says of itself.


@pytest.mark.parametrize("name", SUPPORTED)
def test_defaults_are_those_of_transformers(name: str) -> None:
    configs = pytest.importorskip("transformers.models.auto.configuration_auto")
    kind = configs.CONFIG_MAPPING[name]
    theirs = {key: getattr(kind, key) for key in FAMILIES[name].defaults if key in kind.__dataclass_fields__}
    assert theirs == {key: FAMILIES[name].defaults[key] for key in theirs}
    unsaid = FAMILIES[name].defaults.keys() - theirs.keys()
    assert unsaid <= {
        "head_dim",
        "rope_theta",
        "rope_local_base_freq",
        "partial_rotary_factor",
        "sliding_window_pattern",
    }
    bare = read({"model_type": name, **dict.fromkeys(required(name), 64), "hidden_size": 128})
    theta = kind.default_theta
    assert (bare.rope_theta, bare.rope_local_theta) == (
        (theta["global"], theta["local"]) if isinstance(theta, dict) else (theta, None)
    )


def required(name: str) -> set[str]:
    sizes = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
    return {key for key in sizes if key not in FAMILIES[name].defaults}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_saves_is_read_alike(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(**CONFIGS[name])
    for use_diff in (True, False):
        assert read(json.loads(theirs.to_json_string(use_diff=use_diff))) == read(CONFIGS[name])


# Reading.


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_parameters_they_say(name: str) -> None:
    count, said = PUBLISHED[name]
    assert num_parameters(read(said)) == count


@pytest.mark.parametrize("name", CONFIGS)
def test_both_spellings_of_rope_say_the_same(name: str) -> None:
    older = in_older_spelling(CONFIGS[name])
    assert read(older) == read(CONFIGS[name])
    if "rope_parameters" in CONFIGS[name]:
        assert read({**CONFIGS[name], **older}) == read(CONFIGS[name])  # said twice, the same


def test_settings_of_families() -> None:
    gemma = read(PUBLISHED["google/gemma-3-1b-pt"][1])
    assert gemma.global_layers == (5, 11, 17, 23)
    assert (gemma.sliding_window, gemma.rope_theta, gemma.rope_local_theta) == (512, 1e6, 1e4)
    assert (gemma.attention_multiplier, gemma.tie_word_embeddings) == (1 / 16, True)
    granite = read(PUBLISHED["ibm-granite/granite-3.0-8b-base"][1])
    assert (granite.logits_scaling, granite.attention_multiplier) == (16, 1 / 128)
    smol = read(PUBLISHED["HuggingFaceTB/SmolLM3-3B"][1])
    assert smol.layers_without_rope == tuple(range(3, 36, 4))
    qwen = read(PUBLISHED["Qwen/Qwen2.5-7B"][1])
    assert (qwen.attention_bias, qwen.attention_out_bias, qwen.sliding_window) == (True, False, None)
    phi = read(PUBLISHED["microsoft/Phi-4-mini-instruct"][1])
    assert phi.rope_scaling is not None
    assert (phi.rope_scaling.kind, phi.rope_scaling.original_max_position_embeddings) == ("longrope", 4096)
    assert (phi.rotary_width, phi.sliding_window) == (96, 262144)
    mistral = read(without(PUBLISHED["mistralai/Mistral-7B-v0.1"][1], "sliding_window"))
    assert mistral.sliding_window == 4096  # what transformers takes where nothing is said


def test_the_architecture_stands_in_for_the_type() -> None:
    assert read({**without(config("qwen3"), "model_type"), "architectures": ["Qwen3ForCausalLM"]}).family == "qwen3"
    assert read({**config("llama"), "architectures": ["LLaMAForCausalLM"]}).family == "llama"  # the first of them


def test_keys_that_change_nothing_are_passed_over() -> None:
    more = {
        "use_cache": False, "attention_dropout": 0.1, "pretraining_tp": 4, "dtype": "float16", "unheard": {"a": 1},
        "quantization_config": None, "num_experts": 0, "is_encoder_decoder": False, "attn_logit_softcapping": None,
        "partial_rotary_factor": 1.0, "sliding_window": 4096, "use_sliding_window": False, "pruned_heads": {},
    }  # fmt: skip
    assert read({**config("llama"), **more}) == read(config("llama"))
    assert read({**config("qwen2"), "attention_bias": True}) == read(config("qwen2"))


REFUSED: dict[str, tuple[Config, str]] = {
    "gemma2": (
        config("gemma2"),
        "model_type = 'gemma2' cannot be: softcapping of attention scores has no kernel that avoids an S x S matrix of "
        "scores; triax reads llama, mistral, qwen2, qwen3, smollm3, granite, phi3, gemma3_text, olmo2, mixtral, "
        "qwen3_moe or olmoe.",
    ),
    "a near name": (
        config("lama"), "model_type = 'lama' cannot be: no such architecture is read; the nearest is llama.",
    ),
    "no near name": (config("bloom"), "triax reads llama, mistral,"),
    "latent attention": (config("deepseek_v3"), "its attention compresses keys and values, which triax's does not"),
    "experts of another kind": (config("gpt_oss"), "its attention has sinks, and its experts have biases"),
    "no experts": (config("qwen3_moe", num_experts=0), "num_experts = 0 cannot be: use a whole number of 1 or more."),
    "no layer with experts": (
        config("qwen3_moe", num_experts=8, decoder_sparse_step=5), "no layer of 4 has experts",
    ),
    "more experts for each token than there are": (
        config("mixtral", num_local_experts=2, num_experts_per_tok=3),
        "num_experts_per_tok=3 is more than num_experts=2: use at most 2.",
    ),
    "no type": (without(config("llama"), "model_type"), "model_type is missing: name the architecture, such as llama,"),
    "a type of the wrong kind": (config("llama") | {"model_type": 3}, "model_type = 3 cannot be"),
    "another head": (
        config("llama", architectures=["LlamaForSequenceClassification"]),
        "architectures = ['LlamaForSequenceClassification'] cannot be: of model_type llama, LlamaForCausalLM alone is",
    ),
    "two that matter": (
        config("llama", num_local_experts=8, quantization_config={"bits": 4}),
        "num_local_experts = 8 cannot be for model_type llama: this family has no experts: mixtral, "
        "qwen3_moe and olmoe have.\nquantization_config = {'bits': 4} cannot be for model_type llama: its weights are "
        "quantised",
    ),
    "softcapping": (config("gemma3_text", attn_logit_softcapping=50.0), "an S x S matrix of scores"),
    "a cap of logits": (config("gemma3_text", final_logit_softcapping=30.0), "without a cap"),
    "both directions": (config("gemma3_text", use_bidirectional_attention=True), "attention looks back only"),
    "an encoder": (config("llama", is_encoder_decoder=True), "triax trains decoders that attend to themselves"),
    "an activation": (
        config("llama", hidden_act="relu2"), "hidden_act = 'relu2' cannot be: use silu, swish or gelu_pytorch_tanh."
    ),
    "a multiplier": (config("llama", embedding_multiplier=12), "this family has no multipliers"),
    "a bias": (config("mistral", attention_bias=True), "this family has no such biases"),
    "a window": (config("llama", sliding_window=4096), "this family has no windows in transformers, so use null"),
    "a window, unused": (
        config("mistral", sliding_window=5, use_sliding_window=False), "transformers would use the window all the same"
    ),
    "a window of nothing": (config("mistral", sliding_window=0), "sliding_window = 0 cannot be: use a whole number"),
    "no window": (config("gemma3_text", sliding_window=None), "sliding_window = None cannot be: layers of sliding_att"),
    "no window, listed": (config("qwen3", layer_types=[WINDOWED] * 4), "and use_sliding_window true where it is a key"),
    "too few layers": (config("qwen3", layer_types=[FULL]), "there are 4 layers, and it names 1"),
    "other layers": (
        config("qwen3", layer_types=["linear_attention"] * 4), "'linear_attention' is none of full_attention, sliding_"
    ),
    "layers where all are alike": (
        config("mistral", sliding_window=5, layer_types=[FULL] * 4), "all layers of this family see the same"
    ),
    "layers without rope": (
        config("smollm3", no_rope_layers=[0, 2, 1, 1]), "use a list of 4 numbers, 1 for a layer with rope and 0 for oth"
    ),
    "an interval of nothing": (config("smollm3", no_rope_layer_interval=0), "no_rope_layer_interval = 0 cannot be"),
    "a count that is a flag": (config("smollm3", no_rope_layer_interval=True), "no_rope_layer_interval = True cannot"),
    "a kind of rope": (
        stretched("llama", "mrope"),
        "rope_parameters.rope_type = 'mrope' cannot be: use default, linear, dynamic, llama3, yarn, longrope.",
    ),
    "a kind of phi's": (stretched("phi3", "linear", factor=2.0), "use default, longrope."),
    "a number of the rope": (
        stretched("llama", "dynamic", factor=2.0, alpha=1000.0),
        "rope_parameters.alpha = 1000.0 cannot be: triax knows no such number of a rope.",
    ),
    "a missing number": (stretched("llama", "llama3", factor=2.0), "rope_parameters.low_freq_factor is missing: lla"),
    "a missing kind": (config("llama", rope_scaling={"factor": 2.0}), "rope_scaling.rope_type is missing: factor is"),
    "no factors": (
        stretched("llama", "longrope", short_factor=[1.0], long_factor=[1.0] * 3),
        "rope_scaling.short_factor has 1 factors, and 3 pairs turn: give 3, each above zero.",
    ),
    "a factor of nothing": (stretched("llama", "linear", factor=0), "rope_scaling.factor = 0.0 cannot be: use more th"),
    "rope said twice": (
        config(
            "llama", rope_scaling={"type": "linear", "factor": 2.0},
            rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
        ),
        "rope_parameters says another: say it once, or twice the same",
    ),
    "a base said twice": (
        config("llama", rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        "rope_parameters.rope_theta = 10000.0 cannot be: rope_theta = 500000.0 stands beside it",
    ),
    "a length said twice": (
        stretched("llama", "yarn", factor=2.0, original_max_position_embeddings=8)
        | {"original_max_position_embeddings": 16},
        "rope_parameters.original_max_position_embeddings = 8 cannot be: 16 stands beside it",
    ),
    "rope by layers": (config("qwen3", rope_parameters=GEMMA_ROPE), "all layers of this family turn alike"),
    "rope not by layers": (
        config("gemma3_text", rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
        "this family says it for full_attention and sliding_attention apart",
    ),
    "a name of the older spelling": (
        config("gemma3_text", rope_scaling={"type": "linear", "factor": 8.0}),
        "rope_scaling.type = 'linear' cannot be: transformers 5 passes over that name in this family: write rope_type.",
    ),
    "a stretched window": (
        config("gemma3_text", rope_parameters={WINDOWED: {"rope_type": "linear", "factor": 8.0}}),
        "rope_parameters.sliding_attention.rope_type = 'linear' cannot be: layers with a window are not stretched",
    ),
    "part of a head": (config("llama", partial_rotary_factor=0.5), "this family turns every number of a head"),
    "part of a head, inside": (
        config("llama", rope_parameters={"partial_rotary_factor": 0.5}), "this family turns every number of a head"
    ),
    "an odd part": (config("phi3", partial_rotary_factor=0.5), "partial_rotary_factor=0.5 turns 3 of 6 numbers"),
    "an odd head": (config("llama", head_dim=7), "head_dim=7 is odd"),
    "no size": (without(config("llama"), "hidden_size"), "hidden_size is missing: use a whole number of 1 or more"),
    "a size of text": (config("llama", hidden_size="4096"), "hidden_size = '4096' cannot be: use a whole number"),
    "a size that is a flag": (config("llama", num_hidden_layers=True), "num_hidden_layers = True cannot be"),
    "a size with a fraction": (config("llama", vocab_size=61.0), "vocab_size = 61.0 cannot be: use a whole number"),
    "too many layers": (config("smollm3", num_hidden_layers=10**12), "num_hidden_layers = 1000000000000 cannot be:"),
    "a number of text": (config("llama", rms_norm_eps="1e-5"), "rms_norm_eps = '1e-5' cannot be: use a finite number"),
    "an endless number": (config("llama", rope_theta=float("inf")), "rope_theta = inf cannot be: use a finite number"),
    "a number beyond all": (config("llama", rope_theta=10**400), "cannot be: use a finite number"),
    "a flag of text": (config("llama", tie_word_embeddings="no"), "tie_word_embeddings = 'no' cannot be: use true or"),
    "nothing for a flag": (config("llama", tie_word_embeddings=None), "tie_word_embeddings = None cannot be: use true"),
    "rope as a list": (config("llama", rope_scaling=[1]), "rope_scaling = [1] cannot be: use an object, or null"),
    "sense": (config("llama", vision_config={"depth": 2}), "it sees or hears besides reading"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_name(name: str) -> None:
    said, sentence = REFUSED[name]
    assert sentence in refusal(said)


def test_every_unsupported_type_has_a_reason() -> None:
    for name, reason in REFUSED_TYPES.items():
        assert reason in refusal(config(name))
    assert not REFUSED_TYPES.keys() & FAMILIES.keys()


def test_every_key_that_matters_is_refused_where_it_is_not_read() -> None:
    """Unless its value is neutral; a family that reads the key judges the value itself."""
    for matter in MATTERS:
        for key in matter.keys:
            assert matter.reason in refusal(config("mistral", **{key: 0.125}))
            for neutral in (None, *matter.neutral):
                assert read(config("mistral", **{key: neutral})) == read(config("mistral"))


# Writing.


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_survives_its_config(name: str) -> None:
    model = read(CONFIGS[name])
    assert read(written(model)) == model
    assert read(written(model, CONFIGS[name])) == model
    older = without(written(model), "rope_parameters", "dtype")
    assert read(older) == model, "transformers 4 does not know rope_parameters"
    assert read(without(written(model), "rope_scaling", "rope_theta", "rope_local_base_freq", "torch_dtype")) == model


def test_what_an_imported_config_says_beside_the_network_is_carried_along() -> None:
    base = config(
        "llama", eos_token_id=[7, 8], attention_dropout=0.1, unheard="of", torch_dtype="float16", rope_theta=1e5,
        auto_map={"AutoModel": "x.Y"}, transformers_version="4.1", _name_or_path="somebody/else", max_window_layers=3,
    )  # fmt: skip
    said = written(read(base), base)
    assert said["eos_token_id"] == [7, 8]
    assert (said["attention_dropout"], said["unheard"]) == (0.1, "of")
    assert (said["dtype"], said["torch_dtype"], said["rope_theta"]) == ("bfloat16", "bfloat16", 1e5)
    assert not said.keys() & {"auto_map", "transformers_version", "_name_or_path", "max_window_layers"}
    assert written(read(base))["eos_token_id"] is None, "no token of the default vocabulary, where none is known"


def test_phi3_of_transformers_4_gets_its_three_keys() -> None:
    said = written(read(CONFIGS["phi3, longrope of a part"]))
    assert said["rope_scaling"].keys() == {"type", "short_factor", "long_factor"}
    assert (said["original_max_position_embeddings"], said["partial_rotary_factor"]) == (32, 0.75)


def test_windows_are_also_said_for_readers_without_layer_types() -> None:
    model = read(CONFIGS["qwen2, window in late layers"])
    assert written(model)["max_window_layers"] == 2
    assert read(without(written(model), "layer_types")) == model
    assert written(read(CONFIGS["qwen2"]))["max_window_layers"] == 4


def test_a_stretch_that_follows_from_the_lengths_need_not_be_said() -> None:
    factors: Config = {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3, "original_max_position_embeddings": 16}
    assert read(stretched("llama", "longrope", factor=4.0, **factors)) == read(
        stretched("llama", "longrope", **factors)
    )
    assert read(stretched("llama", "longrope", factor=5.0, **factors)) != read(
        stretched("llama", "longrope", **factors)
    )
    yarn: Config = {"original_max_position_embeddings": 16}
    assert read(stretched("llama", "yarn", factor=4.0, **yarn)) == read(stretched("llama", "yarn", factor=None, **yarn))


def spec(**settings: Any) -> ModelSpec:
    sizes = {key: config("llama")[key] for key in (*required("llama"), "max_position_embeddings")}
    return ModelSpec.model_validate({**sizes, **settings})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"qk_norm": "head"}, "a llama of Hugging Face's cannot have qk_norm='head': set model.family to qwen3."),
        ({"family": "qwen2"}, "cannot have attention_bias=False: set model.family to llama, mistral, smollm3"),
        ({"family": "mistral", "attention_bias": True}, "cannot have attention_bias=True: set model.family to qwen2."),
        ({"sliding_window": 5}, "cannot have sliding_window=5: set model.family to mistral, smollm3 or phi3."),
        ({"sliding_window": 5, "qk_norm": "full"}, "no family that triax knows can."),
        (
            {"hidden_size": 30, "head_dim": 6},
            "num_attention_heads=4 that does not divide hidden_size=30: set model.fam",
        ),
        ({"rope_local_theta": 1e3, "sliding_window": 9, "global_layers": (0,)}, "rope_local_theta=1000.0"),
        ({"family": "lama"}, "model.family = 'lama' cannot be: no such architecture is read; the nearest is llama."),
        ({"rope_scaling": {"kind": "dynamic", "factor": 2.0, "original_max_position_embeddings": 9}}, "rope_scaling={"),
        ({"family": "phi3", "rope_scaling": {"kind": "linear", "factor": 2.0}}, "set model.family to llama, mistral"),
        ({"family": "granite", "partial_rotary_factor": 0.7}, "partial_rotary_factor=0.7: set model.family to phi3."),
    ],
)
def test_a_setting_that_a_family_cannot_say_is_refused(settings: Config, sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        config_of(spec(**settings), dtype="float32")
    assert sentence in str(caught.value)


def test_settings_that_make_the_same_network_are_no_difference() -> None:
    """Absent is what it stands for; a window that no layer has, and the base of layers that are not there, are none."""
    config_of(spec(attention_multiplier=6**-0.5, sliding_window=5, global_layers=(3, 2, 1, 0)), dtype="float32")
    config_of(spec(rope_local_theta=1e3), dtype="float32")
    yarn = {"kind": "yarn", "original_max_position_embeddings": 16}
    assert written(spec(rope_scaling=yarn))["rope_parameters"]["factor"] == 4.0
    gemma = read(CONFIGS["gemma3"])
    assert (
        written(gemma.model_copy(update={"rope_theta": 1e4, "rope_local_theta": None}))["rope_local_base_freq"] == 1e4
    )


# Where weights lie.


def test_weights_of_most_families_are_whole_tensors() -> None:
    for name in ("llama, biases", "gemma3", "olmo2"):
        model = read(CONFIGS[name])
        table = {row.name: row.hf_name for row in weights_table(model)}
        assert tensor_sources(model) == {name: (Source(hf_name, 0, None),) for name, hf_name in table.items()}


def test_fused_tensors_are_cut_into_rows_without_gap_or_overlap() -> None:
    model = read(config("phi3", num_attention_heads=4, num_key_value_heads=2))
    sources = tensor_sources(model)
    assert sources.keys() == {row.name for row in weights_table(model)}
    heads = [source for name in "qkv" for source in sources[f"layers.3.self_attn.{name}_proj.weight"]]
    assert {source.hf_name for source in heads} == {"model.layers.3.self_attn.qkv_proj.weight"}
    assert [(source.first_row, source.num_rows) for source in heads] == [(0, 24), (24, 12), (36, 12)]
    gate, up = (sources[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert gate == (Source("model.layers.0.mlp.gate_up_proj.weight", 0, 40),)
    assert up == (Source("model.layers.0.mlp.gate_up_proj.weight", 40, 40),)
    assert sources["layers.0.mlp.down_proj.weight"] == (Source("model.layers.0.mlp.down_proj.weight", 0, None),)
    for one, other in pairwise(heads):
        assert other.first_row == one.first_row + (one.num_rows or 0)


def test_each_expert_is_a_tensor_of_its_own_by_its_familys_name() -> None:
    mixtral = tensor_sources(read(CONFIGS["mixtral"]))
    assert mixtral["layers.1.mlp.experts.up_proj"] == tuple(
        Source(f"model.layers.1.block_sparse_moe.experts.{expert}.w3.weight", 0, None) for expert in range(6)
    )
    assert mixtral["layers.1.mlp.gate.weight"] == (Source("model.layers.1.block_sparse_moe.gate.weight", 0, None),)
    qwen = tensor_sources(read(CONFIGS["qwen3_moe, biases, some layers dense, raw scores"]))
    assert [source.hf_name for source in qwen["layers.1.mlp.experts.down_proj"]] == [
        f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in range(5)
    ]
    assert qwen["layers.0.mlp.down_proj.weight"] == (Source("model.layers.0.mlp.down_proj.weight", 0, None),)
    assert qwen["layers.1.mlp.gate.weight"] == (Source("model.layers.1.mlp.gate.weight", 0, None),)


def test_experts_are_read_by_either_name_of_their_number() -> None:
    qwen = CONFIGS["qwen3_moe"]
    assert read(without(qwen, "num_experts") | {"num_local_experts": 6}) == read(qwen)
    assert read(qwen | {"num_local_experts": 6}) == read(qwen)
    assert "num_experts = 6 cannot be: num_local_experts says the same, and says 5." in refusal(
        qwen | {"num_local_experts": 5}
    )
    assert written(read(qwen))["num_experts"] == 6
    assert written(read(CONFIGS["mixtral"]))["num_local_experts"] == 6


def test_settings_of_training_alone_do_not_keep_a_model_from_being_written() -> None:
    model = read(CONFIGS["mixtral"])
    assert model.experts is not None
    trained = model.model_copy(
        update={"experts": model.experts.model_copy(update={"router_z_loss_coef": 0.1}), "intermediate_size": 999}
    )
    assert read(written(trained)) == model, "no layer is dense, so that its width is no matter"
    assert written(trained)["router_aux_loss_coef"] == 0.001


# Any config at all.

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.integers(), st.floats(), st.sampled_from([1.0, 0.5, 10**400]),
    st.text(max_size=6), st.sampled_from(["yarn", "su", "default", FULL, WINDOWED, "silu", "\ud800"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", FULL, WINDOWED, "x"]), inner, max_size=3),
    ),
    max_leaves=6,
)
KEYS = sorted(
    {key for said in CONFIGS.values() for key in said}
    | {key for family in FAMILIES.values() for key in family.defaults}
    | {key for matter in MATTERS for key in matter.keys}
    | {"rope_scaling", "rope_parameters", "architectures", "model_type", "layer_types"}
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """A legal config, in either spelling, of which a few keys were dropped, replaced or added, also inside the rope."""
    said = dict(CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))])
    if draw(st.booleans()):
        said = in_older_spelling(said)
    for key in draw(st.lists(st.sampled_from(KEYS), max_size=3)):
        if draw(st.integers(0, 3)) == 0:
            said.pop(key, None)
        else:
            said[key] = draw(VALUES)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(said.get(key), dict) and draw(st.integers(0, 2)) == 0:
            inner = draw(
                st.sampled_from(["rope_type", "type", "factor", "rope_theta", "beta_fast", "short_factor", FULL])
            )
            said[key] = {**said[key], inner: draw(VALUES)}
    return said


@given(configs())
def test_any_config_is_a_model_or_a_sentence(said: Config) -> None:
    sentences = ""
    try:
        model = read(said)
    except BadInput as refused:
        sentences = str(refused)
    if sentences:
        event("refused")
        assert all(line.startswith(ORIGIN) and len(line) < 2000 for line in sentences.split("\n"))
        return
    event("read")
    try:
        back = written(model, said)
    except BadInput:
        event("cannot be written")
        assert model.hidden_size % model.num_attention_heads
        return
    assert read(back) == model


@given(configs())
def test_what_transformers_makes_of_any_config_is_what_was_read(said: Config) -> None:
    """transformers fills in its defaults and its reading of both spellings; what it saves then has to be the same."""
    transformers = pytest.importorskip("transformers")
    try:
        model = read(said)
    except BadInput:
        assume(False)
    try:
        theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(said)))
    except Exception:  # whatever it raises: it does not open what was read here
        event("transformers refuses")
        return
    event("both read")
    assert read(json.loads(theirs.to_json_string(use_diff=False))) == model


FACTORS = st.sampled_from([1.0, 2.0, 3.5, 4.0])
STRETCHES = st.one_of(
    st.fixed_dictionaries({"kind": st.sampled_from(["linear", "dynamic"]), "factor": FACTORS}),
    st.fixed_dictionaries(
        {"kind": st.just("llama3"), "factor": FACTORS, "high_freq_factor": FACTORS.map(lambda x: x + 1)}
    ),
    st.fixed_dictionaries(
        {"kind": st.just("yarn")},
        optional={"factor": FACTORS, "truncate": st.booleans(), "mscale": FACTORS, "attention_factor": FACTORS},
    ),
    st.fixed_dictionaries(
        {"kind": st.just("longrope"), "short_factor": st.just((1.0,) * 3), "long_factor": st.just((2.0,) * 3)},
        optional={"factor": FACTORS, "original_max_position_embeddings": st.sampled_from([8, 64, 100])},
    ),
)
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "family": st.sampled_from(SUPPORTED),
    "hidden_size": st.sampled_from([24, 30]),
    "head_dim": st.sampled_from([6, 8]),
    "hidden_act": st.sampled_from(["silu", "gelu_pytorch_tanh"]),
    "attention_bias": st.booleans(),
    "attention_out_bias": st.booleans(),
    "mlp_bias": st.booleans(),
    "qk_norm": st.sampled_from(["none", "head", "full"]),
    "norm_placement": st.sampled_from(["pre", "post", "both"]),
    "sliding_window": st.one_of(st.none(), st.integers(1, 9)),
    "global_layers": st.sampled_from([(), (0,), (2, 3), (3, 2, 1, 0)]),
    "layers_without_rope": st.sampled_from([(), (1,)]),
    "partial_rotary_factor": st.sampled_from([0.5, 1.0]),
    "rope_local_theta": st.sampled_from([None, 1e3, 1e4]),
    "rope_scaling": st.one_of(st.none(), STRETCHES),
    "attention_multiplier": st.one_of(st.sampled_from([None, 7**-0.5, 1e-200, 1e200]), st.floats(1e-3, 1e3)),
    "logits_scaling": st.floats(1e-3, 1e3),
    "embedding_multiplier": st.sampled_from([1.0, 24**0.5, 30**0.5]),
    "norm_is_offset": st.booleans(),
    "experts": st.none()
    | st.fixed_dictionaries(
        {"num_experts": st.just(4), "num_experts_per_tok": st.integers(1, 5)},
        optional={
            "moe_intermediate_size": st.just(24),
            "scoring_func": st.sampled_from(["softmax", "sigmoid"]),
            "norm_topk_prob": st.booleans(),
            "first_k_dense_replace": st.integers(0, 4),
            "decoder_sparse_step": st.integers(1, 3),
            "mlp_only_layers": st.sampled_from([(), (0,), (1, 3)]),
            "shared_expert_intermediate_size": st.sampled_from([0, 8]),
            "selection_bias": st.booleans(),
        },
    ),
}


@st.composite
def settings_of_models(draw: st.DrawFn) -> Config:
    """Those of a family's model, of which up to two were changed."""
    settings = read(CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))]).model_dump()
    changed = draw(st.lists(st.sampled_from(sorted(SETTINGS)), max_size=2, unique=True))
    return settings | {key: draw(SETTINGS[key]) for key in changed}


@given(settings_of_models())
def test_what_is_written_of_any_model_is_opened_by_transformers(settings: Config) -> None:
    """Or the model is refused with the name of what its family cannot say."""
    transformers = pytest.importorskip("transformers")
    try:
        said = written(ModelSpec.model_validate(settings))
    except (BadInput, ValidationError):
        event("refused")
        return
    event("written")
    theirs = transformers.AutoConfig.for_model(**said)
    assert read(json.loads(theirs.to_json_string(use_diff=False))) == read(said)
