"""Do Llama's relatives pass ``triax verify``, also where a gradient is zero but for rounding?"""

from collections.abc import Callable

import pytest

from tests.harness.commands import Said

KINDS = {
    # The bias of keys without positions: softmax does not feel it.
    "no positions, biases": ["model.layers_without_rope=[0,1,2]", "model.attention_bias=true", "model.mlp_bias=true"],
    "windows": ["model.sliding_window=16", "model.global_layers=[3,7]", "model.rope_local_theta=1e3"],
    "norms around": ["model.norm_placement=both", "model.qk_norm=head", "model.norm_is_offset=true"],
    "stretched": ['model.rope_scaling={kind="dynamic",factor=2.0}', "model.max_position_embeddings=64"],
    "multipliers": ["model.embedding_multiplier=2.0", "model.residual_multiplier=0.5", "model.logits_scaling=2.0"],
    "untied, one document": ["model.tie_word_embeddings=false", "data.attend_across_documents=true"],
}


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_passes(kind: str, precision: str, verify: Callable[..., Said]) -> None:
    said = verify("tp=2", "--precision", precision, *KINDS[kind])
    assert said.code == 0, said.err
    assert "different" not in said.out
