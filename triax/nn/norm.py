"""How is a hidden state brought to unit size? By its root mean square (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triax.spec.model import ModelSpec


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, with the statistic in at least fp32."""

    def __init__(self, width: int, model: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = model.rms_norm_eps
        self.is_offset = model.norm_is_offset

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the normalised ``x`` in its own dtype."""
        wide = x_BSD.to(torch.promote_types(x_BSD.dtype, torch.float32))
        normed = F.rms_norm(wide, (wide.shape[-1],), None, self.eps)
        weight = self.scale()
        if self.is_offset:
            # A weight near zero is precise, and one plus it would not be in bf16: multiply before narrowing.
            return (normed * (1.0 + weight.to(wide.dtype))).to(x_BSD.dtype)
        return normed.to(x_BSD.dtype) * weight

    def scale(self) -> Tensor:
        """Return the weight as it is multiplied."""
        return self.weight
