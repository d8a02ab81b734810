"""What does each position compute on its own? A gated feed-forward network (SwiGLU: Shazeer 2020, arXiv:2002.05202)."""

import torch.nn.functional as F
from torch import Tensor, nn

from triax.spec.model import ModelSpec


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), from D to F and back."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.up_proj = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.down_proj = nn.Linear(model.intermediate_size, model.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return (B, S, D)."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))
        return out
