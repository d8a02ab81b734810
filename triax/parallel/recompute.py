"""Which activations are thrown away in the forward and computed again in the backward?

none: all are kept. full: a layer keeps its input alone (Chen et al. 2016, arXiv:1604.06174). selective: a layer keeps
what is dear to compute (matmuls and attention) and recomputes norms, rotations and gates, which are cheap and large
(Korthikanti et al. 2022, arXiv:2205.05198, turned around for flash attention).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from triax.nn.decoder import Decoder
from triax.nn.ranges import ATTEND_RANGES
from triax.spec.layout import Recompute

_DEAR: Final = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._grouped_mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
        ATTEND_RANGES,
    }
)


def wrap_recompute(stage: Decoder, recompute: Recompute) -> None:
    """Make every layer of ``stage`` recompute as said. Parameters keep their names, and results their bits."""
    if recompute == "none":
        return
    context: dict[str, Any] = {"context_fn": _selective_contexts} if recompute == "selective" else {}
    for layer in stage.layers.values():
        layer.forward = partial(_recomputed, layer.forward, context)


def _recomputed(forward: Callable[..., Tensor], context: dict[str, Any], *args: Any) -> Tensor:
    out: Tensor = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **context)
    return out


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_what_is_dear)


def _keep_what_is_dear(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _DEAR else CheckpointPolicy.PREFER_RECOMPUTE
