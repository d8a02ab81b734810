"""Does the weights table say exactly what the network has, and count what was published?"""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.nn.decoder import Decoder
from triax.spec.experts import ExpertSpec
from triax.spec.model import ModelSpec, NormPlacement
from triax.spec.weights import num_active_parameters, num_parameters, weights_table


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: bool) -> ModelSpec:
    return ModelSpec(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocab, **more,
    )  # fmt: skip


LLAMA_3_1_8B = llama(4096, 14336, 32, 32, 8, 128256)
TABLES = {
    "llama-2-7b": llama(4096, 11008, 32, 32, 32, 32000),
    "llama-3.1-8b": LLAMA_3_1_8B,
    "llama-3.1-70b": llama(8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-405b": llama(16384, 53248, 126, 128, 8, 128256),
    "llama-3.2-1b": llama(2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True),
    "smollm2-135m": llama(576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True),
}
# Parameters as the page of each model on the Hugging Face hub counts them.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "smollm2-135m": 134_515_008,
}


def network(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(weight.shape) for name, weight in Decoder(model).named_parameters()}


def table(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    rows = weights_table(model)
    assert len({row.name for row in rows}) == len(rows)
    return {row.name: row.shape for row in rows}


@st.composite
def experts(draw: st.DrawFn, layers: int) -> ExpertSpec:
    count = draw(st.integers(1, 6))
    return ExpertSpec(
        num_experts=count,
        num_experts_per_tok=draw(st.integers(1, count)),
        moe_intermediate_size=draw(st.integers(1, 40)),
        selection_bias=draw(st.booleans()),
        shared_expert_intermediate_size=draw(st.sampled_from([0, 7])),
        first_k_dense_replace=draw(st.integers(0, layers - 1)),
    )


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 4))
    width = 2 * draw(st.integers(1, 8))
    own_width = draw(st.booleans())
    layers = draw(st.integers(1, 4))
    return ModelSpec(
        experts=draw(st.none() | experts(layers)),
        hidden_size=draw(st.integers(1, 70)) if own_width else heads * width,
        intermediate_size=draw(st.integers(1, 70)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from([kv_heads, None])),
        head_dim=width if own_width else None,
        vocab_size=draw(st.integers(2, 300)),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        attention_out_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.sampled_from(get_args(ModelSpec.model_fields["qk_norm"].annotation))),
        norm_placement=draw(st.sampled_from(get_args(NormPlacement))),
    )


@settings(max_examples=50)
@given(models())
def test_the_table_is_the_network(model: ModelSpec) -> None:
    assert table(model) == network(model)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.2-1b", "smollm2-135m"])
def test_the_table_of_a_real_model_is_its_network(name: str) -> None:
    assert table(TABLES[name]) == network(TABLES[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert num_parameters(TABLES[name]) == PUBLISHED[name]


@given(models())
def test_rows_agree_with_themselves(model: ModelSpec) -> None:
    rows = weights_table(model)
    assert num_parameters(model) == sum(row.numel for row in rows)
    for row in rows:
        assert row.numel == torch.Size(row.shape).numel()
        assert row.decays == (row.role not in ("norm", "bias", "selection_bias"))
        assert row.decays == (not row.name.endswith(("norm.weight", "bias")))
        assert row.decays or not row.is_matmul
        assert row.tp_dim is not None or row.is_of_experts or row.role in ("norm", "bias", "router", "selection_bias")
        assert row.shape[0] % row.num_experts == 0
        assert (row.layer is None) == (not row.name.startswith("layers."))
        assert row.layer is None or f"layers.{row.layer}." in row.name
    assert sorted({row.layer for row in rows if row.layer is not None}) == list(range(model.num_hidden_layers))


@given(models())
def test_tokens_meet_one_head(model: ModelSpec) -> None:
    """What every token is multiplied by: seven matrices of each dense layer, those four of attention, the router and
    three kinds of experts, and perhaps three shared ones, of others; and one head, tied or not."""
    rows = weights_table(model)
    outside = [row for row in rows if row.is_matmul and row.layer is None]
    assert [row.role for row in outside] == (["embedding"] if model.tie_word_embeddings else ["head"])
    assert outside[0].shape == (model.vocab_size, model.hidden_size)
    sparse = len(model.sparse_layers)
    of_sparse = 8 + 3 * (model.experts is not None and model.experts.shared_expert_intermediate_size > 0)
    assert sum(row.is_matmul for row in rows) == 7 * (model.num_hidden_layers - sparse) + of_sparse * sparse + 1


@given(models())
def test_a_bias_is_cut_with_the_outputs_it_is_added_to(model: ModelSpec) -> None:
    rows = {row.name: row for row in weights_table(model)}
    for name, bias in rows.items():
        if bias.role == "bias":
            matrix = rows[name.removesuffix("bias") + "weight"]
            assert bias.shape == matrix.shape[:1]
            assert bias.tp_dim == (0 if matrix.tp_dim == 0 else None)


@given(models())
def test_a_token_meets_the_experts_it_chose(model: ModelSpec) -> None:
    idle = num_parameters(model) - num_active_parameters(model)
    if model.experts is None:
        assert idle == 0
        return
    experts = model.experts
    of_one = 3 * model.hidden_size * experts.moe_intermediate_size
    assert idle == len(model.sparse_layers) * (experts.num_experts - experts.num_experts_per_tok) * of_one


def test_mixtral_has_as_many_as_published() -> None:
    """46.7 billion, of which a token meets 12.9 (Jiang et al. 2024, arXiv:2401.04088, section 2)."""
    experts = ExpertSpec(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=14336)
    mixtral = llama(4096, 14336, 32, 32, 8, 32000).model_copy(update={"experts": experts})
    assert num_parameters(mixtral) == 46_702_792_704
    assert num_active_parameters(mixtral) == pytest.approx(12.9e9, rel=2e-3)


def test_tensor_parallel_cuts_outputs_then_inputs() -> None:
    rows = {row.role: row for row in weights_table(LLAMA_3_1_8B)}
    columns = {"embedding", "head", "attention_q", "attention_k", "attention_v", "mlp_gate", "mlp_up"}
    assert {role for role, row in rows.items() if row.tp_dim == 0} == columns
    assert {role for role, row in rows.items() if row.tp_dim == 1} == {"attention_out", "mlp_down"}


def test_names_are_hugging_face_names() -> None:
    """Held to the names that transformers gives the same dims; without transformers there is nothing to compare."""
    transformers = pytest.importorskip("transformers")
    for tied in (False, True):
        model = llama(16, 24, 2, 4, 2, 31, tie_word_embeddings=tied)
        config = transformers.LlamaConfig(**model.model_dump(exclude={"head_dim", "rope_theta"}))
        with torch.device("meta"):
            reference = transformers.LlamaForCausalLM(config)
        theirs = {name: tuple(weight.shape) for name, weight in reference.named_parameters()}
        assert {row.hf_name: row.shape for row in weights_table(model)} == theirs
