"""Does the wider network count what the weights table and the FLOP formula count?"""

import pytest

from triax.plan.network import Experts, LatentAttention, Network, network_of
from triax.spec.flops import attended_by, flop_terms
from triax.spec.model import ModelSpec
from triax.spec.weights import num_parameters

TOY = ModelSpec(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=100,
)  # fmt: skip
MODELS = [
    TOY,
    TOY.model_copy(update={"tie_word_embeddings": True}),
    TOY.model_copy(update={"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}),
    TOY.model_copy(update={"qk_norm": "head", "head_dim": 32}),
    TOY.model_copy(update={"qk_norm": "full", "norm_placement": "both"}),
    TOY.model_copy(update={"norm_placement": "post"}),
    TOY.model_copy(update={"sliding_window": 9, "global_layers": (1,)}),
]


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_the_weights_tables(model: ModelSpec) -> None:
    assert network_of(model).parameters == num_parameters(model)


@pytest.mark.parametrize("seq_len", [4, 16, 33])
@pytest.mark.parametrize("model", MODELS)
def test_forward_flops_are_a_third_of_the_flop_terms(model: ModelSpec, seq_len: int) -> None:
    parts = network_of(model).forward_flops((seq_len + 1) / 2)
    terms = {term.name: term.per_token / 3 for term in flop_terms(model, attended_by(model, [seq_len]))}
    del terms["embedding lookup"]
    assert {name: flops for name, flops in parts.items() if flops} == pytest.approx(terms)


def test_deepseek_v3_has_671_billion_parameters_of_which_37_are_active() -> None:
    """arXiv:2412.19437, section 4.2; the layer that predicts further ahead is not in that count."""
    network = Network(
        layers=61, hidden=7168, heads=128, kv_heads=128, head_dim=128, ffn=18432, vocab=129280,
        latent_attention=LatentAttention(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        experts=Experts(count=256, per_token=8, ffn=2048, shared_ffn=2048, dense_layers=3),
    )  # fmt: skip
    assert network.parameters / 1e9 == pytest.approx(671.0, abs=0.1)
    assert network.active_parameters / 1e9 == pytest.approx(37.5, abs=0.2)


def test_mixtral_has_47_billion_parameters() -> None:
    """arXiv:2401.04088: 47B in all, 13B a token."""
    network = Network(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=32000,
        experts=Experts(count=8, per_token=2, ffn=14336),
    )  # fmt: skip
    assert (round(network.parameters / 1e9), round(network.active_parameters / 1e9)) == (47, 13)


def test_gpt3_has_175_billion_parameters() -> None:
    """arXiv:2005.14165, table 2.1."""
    network = Network(
        layers=96, hidden=12288, heads=96, kv_heads=96, head_dim=128, ffn=49152, vocab=50257, is_gated=False,
        is_tied=True, norm="layer", has_qkv_bias=True, has_out_bias=True, has_mlp_bias=True, learned_positions=2048,
    )  # fmt: skip
    assert network.parameters / 1e9 == pytest.approx(174.6, abs=0.1)
