"""What does each position compute on its own? A gated feed-forward network (SwiGLU: Shazeer 2020, arXiv:2002.05202)."""

from collections.abc import Callable
from typing import Final

import torch.nn.functional as F
from torch import Tensor, nn

from triax.spec.model import ModelSpec


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)), from D to F and back."""

    def __init__(self, model: ModelSpec, inner: int, *, has_bias: bool) -> None:
        """``inner`` is F."""
        super().__init__()
        hidden = model.hidden_size
        self.gate_proj = nn.Linear(hidden, inner, bias=has_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=has_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=has_bias)
        self.activation = ACTIVATIONS[model.hidden_act]

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return (B, S, D)."""
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))
        return out


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {"silu": F.silu, "gelu_pytorch_tanh": _gelu_tanh}
"""By ``hidden_act``."""
