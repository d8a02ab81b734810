"""How few and how narrow can experts become and still be routed and spread in the same way? Torch-free."""

from typing import Any, Final

from triax.spec.experts import ExpertSpec

_EXPERTS: Final = 8
"""A multiple of every degree that shrunk layouts spread experts over."""
_GROUPS: Final = (1, 2, 4)
_PER_TOKEN: Final = 3
_LEAST_WIDTH: Final = 8
_GROUPED_WIDTH: Final = 8
"""Widths that are multiples of this go through the grouped matmul in any precision that has one."""


def small_experts(experts: ExpertSpec, dense: tuple[int, ...], ratio: float, tp: int) -> dict[str, Any]:
    """Return the settings of few and narrow experts; ``dense`` are the layers without any.

    Widths become ``ratio`` of what they were; whether they fit the grouped matmul, or divide over ``tp``, stays.
    """
    groups = experts.n_group if experts.n_group in _GROUPS else max(_GROUPS)
    kept = groups if experts.topk_group == experts.n_group else min(experts.topk_group, groups - 1)
    per_group = _EXPERTS // groups
    inner, shared = experts.moe_intermediate_size, experts.shared_expert_intermediate_size
    return experts.model_dump() | {
        "num_experts": _EXPERTS,
        "num_experts_per_tok": min(experts.num_experts_per_tok, _PER_TOKEN, kept * per_group),
        "moe_intermediate_size": _width(inner, ratio, _GROUPED_WIDTH),
        "shared_expert_intermediate_size": _width(shared, ratio, max(tp, 2)) if shared else 0,
        "n_group": groups,
        "topk_group": kept,
        "first_k_dense_replace": 0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def _width(width: int, ratio: float, unit: int) -> int:
    """Return ``ratio`` of ``width``, a multiple of ``unit`` exactly where ``width`` is one."""
    small = max(round(width * ratio) // unit * unit, _LEAST_WIDTH // unit * unit, unit)
    return small + (width % unit != 0)
