"""Which small models with experts do the tests train?"""

from typing import Any

from triax.spec.experts import ExpertSpec
from triax.spec.model import ModelSpec


def with_experts(model: ModelSpec, **settings: Any) -> ModelSpec:
    """Return ``model`` with experts: 6, of which a token goes through 2, unless ``settings`` say otherwise."""
    said = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10} | settings
    return ModelSpec.model_validate(model.model_dump() | {"experts": said})


MIXTRAL: dict[str, Any] = {"router_aux_loss_coef": 0.3, "router_z_loss_coef": 0.1}
"""Scores by softmax, and both penalties, large enough to matter."""

QWEN: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False, "decoder_sparse_step": 2,
    "router_aux_loss_coef": 0.2,
}  # fmt: skip
"""Scores that stay as they are, and every second layer without experts."""

DEEPSEEK: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 3, "scoring_func": "sigmoid", "routed_scaling_factor": 1.7, "n_group": 4,
    "topk_group": 2, "selection_bias": True, "shared_expert_intermediate_size": 9, "first_k_dense_replace": 1,
    "router_aux_loss_coef": 0.2, "router_bias_update_speed": 0.01,
}  # fmt: skip
"""Sigmoids, groups, a bias that moves, a shared expert, and a first layer without experts."""

ROUTERS: dict[str, dict[str, Any]] = {"mixtral": MIXTRAL, "qwen": QWEN, "deepseek": DEEPSEEK}


def spec(**settings: Any) -> ExpertSpec:
    """Return settings of experts alone, as ``with_experts`` makes them."""
    return ExpertSpec(**({"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10} | settings))
