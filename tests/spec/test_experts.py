"""Which settings are a mixture of experts, and what is said of those that are not?"""

from typing import Any

import pytest
from pydantic import ValidationError

from tests.harness.experts import spec, with_experts
from tests.harness.toy import ODD
from triax.errors import BadInput
from triax.spec.faults import validated
from triax.spec.model import ModelSpec
from triax.spec.stages import head_cost_in_layers


def fault(**settings: Any) -> str:
    with pytest.raises(ValidationError) as refusal:
        spec(**settings)
    return str(refusal.value.errors()[0]["msg"]).removeprefix("Value error, ")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 is more than num_experts=6: use at most 6."),
        (
            {"num_experts": 12, "n_group": 5, "topk_group": 2},
            "n_group=5 does not cut num_experts=12 into equal groups of two or more: use 3, 4 or 6.",
        ),
        ({"n_group": 6}, "n_group=6 does not cut num_experts=6 into equal groups of two or more: use 2 or 3."),
        ({"n_group": 3, "topk_group": 4}, "topk_group=4 is more than n_group=3: use at most 3."),
        ({"topk_group": 2}, "topk_group=2 of n_group=1 cannot be: use 1."),
        (
            {"n_group": 3, "topk_group": 1, "num_experts_per_tok": 3},
            "num_experts_per_tok=3 is more than the 2 experts of topk_group=1 of n_group=3 groups: use at most 2.",
        ),
        (
            {"router_bias_update_speed": 0.001},
            "router_bias_update_speed=0.001 moves a selection bias, and there is none: use selection_bias=true, or 0.",
        ),
        (
            {"scoring_func": "sigmoid", "router_z_loss_coef": 0.1},
            "router_z_loss_coef=0.1 is about scores by softmax, and scoring_func=sigmoid has no sum over experts: use "
            "0.",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(settings: dict[str, Any], sentence: str) -> None:
    assert fault(**settings) == sentence


def test_layers_without_experts() -> None:
    def refusal(**settings: Any) -> str:
        with pytest.raises(ValidationError) as error:
            with_experts(ODD, **settings)
        return str(error.value.errors()[0]["msg"])

    assert "experts.mlp_only_layers names layer 3, and there are layers 0 to 2." in refusal(mlp_only_layers=[3])
    assert "no layer of 3 has experts, by experts.first_k_dense_replace=3" in refusal(first_k_dense_replace=3)
    assert "no layer of 3 has experts" in refusal(mlp_only_layers=[0, 1, 2])
    assert list(with_experts(ODD, decoder_sparse_step=2).sparse_layers) == [1]
    assert list(with_experts(ODD, first_k_dense_replace=1, mlp_only_layers=[2]).sparse_layers) == [1]
    assert list(ODD.sparse_layers) == []


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("num_local_experts", "model.experts.num_experts"),
        ("num_experts", "model.experts.num_experts"),
        ("moe_router_topk", "model.experts.num_experts_per_tok"),
    ],
)
def test_keys_outside_their_section_are_told_where_they_stand(key: str, name: str) -> None:
    with pytest.raises(BadInput, match=f"unknown key '{key}': that setting is called {name} here"):
        validated(ModelSpec, ODD.model_dump() | {key: 8}, "run.toml")


def test_a_head_is_worth_the_layers_that_its_tokens_meet() -> None:
    """Experts that nobody chose cost no time; dense layers and others count with their mean."""
    router, attention, experts = 6 * 24, 24 * (24 + 12 + 12 + 24), 2 * 3 * 24 * 10
    assert head_cost_in_layers(with_experts(ODD)) == pytest.approx(61 * 24 / (router + attention + experts))
    dense, sparse = ODD, with_experts(ODD)
    mixed = with_experts(ODD, mlp_only_layers=[0])
    assert 3 / head_cost_in_layers(mixed) == pytest.approx(
        1 / head_cost_in_layers(dense) + 2 / head_cost_in_layers(sparse)
    )
