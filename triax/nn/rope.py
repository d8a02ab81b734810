"""How does attention know where a token stands? Pairs of numbers turn by an angle that grows with the position.

Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and the ways to stretch it, whose sources stand in
``triax.spec.rope``.
"""

import math

import torch
from torch import Tensor

from triax.spec.model import ModelSpec, Reach
from triax.spec.rope import RopeScaling


class Rotation:
    """The cosines and sines that turn pairs of numbers by their position.

    Kept in at least fp32, as the angles of late positions lose all meaning in bf16.
    """

    def __init__(self, cos_BSH: Tensor, sin_BSH: Tensor) -> None:
        self._cos = cos_BSH.unsqueeze(1)
        self._sin = sin_BSH.unsqueeze(1)

    @classmethod
    def at(cls, positions_BS: Tensor, model: ModelSpec, reach: Reach, dtype: torch.dtype) -> "Rotation":
        """Return the rotation for ``positions`` (B, S) in layers of ``reach``, computed in ``dtype``, at least fp32."""
        wide = torch.promote_types(dtype, torch.float32)
        pairs, factor = turns(model, reach, positions_BS.shape[1], positions_BS.device, wide)
        angles = positions_BS.to(wide).unsqueeze(-1) * pairs
        angles = torch.cat((angles, angles), dim=-1)
        return cls(angles.cos() * factor, angles.sin() * factor)

    def apply(self, x_BNSH: Tensor) -> Tensor:
        """Return ``x`` turned: the first half of the turning part of a head pairs with its second half."""
        width = self._cos.shape[-1]
        turning, still = x_BNSH[..., :width], x_BNSH[..., width:]
        wide = turning.to(self._cos.dtype)
        first, second = wide.chunk(2, dim=-1)
        turned = (wide * self._cos + torch.cat((-second, first), dim=-1) * self._sin).to(x_BNSH.dtype)
        return torch.cat((turned, still), dim=-1) if still.shape[-1] else turned


def turns(
    model: ModelSpec, reach: Reach, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """Return the angle by which each pair (H/2,) turns from one position to the next, and the factor of cos and sin.

    ``length`` is that of the sequences: two kinds of stretching depend on it.
    """
    width = model.rotary_width
    exponents = torch.arange(0, width, 2, device=device, dtype=dtype) / width
    if reach == "local" and model.rope_local_theta is not None:
        return model.rope_local_theta**-exponents, 1.0
    plain = model.rope_theta**-exponents
    scaling = model.rope_scaling
    if scaling is None:
        return plain, 1.0
    original = scaling.original_max_position_embeddings or model.max_position_embeddings
    match scaling.kind:
        case "linear":
            return plain / scaling.factor, 1.0
        case "dynamic":
            return _dynamic(model, scaling, exponents, length, original), 1.0
        case "llama3":
            return _llama3(plain, scaling, original), 1.0
        case "yarn":
            return _yarn(model, plain, scaling, original), _yarn_warmth(scaling)
        case "longrope":
            factors = scaling.long_factor if length > original else scaling.short_factor
            stretched = plain / torch.tensor(factors, device=device, dtype=dtype)
            return stretched, _longrope_warmth(model, scaling, original)


def _dynamic(model: ModelSpec, scaling: RopeScaling, exponents: Tensor, length: int, original: int) -> Tensor:
    """The base grows with the length, so that the slowest pair keeps its last angle (NTK-aware scaling, dynamic)."""
    longest = max(length, original)
    width = model.rotary_width
    growth = (scaling.factor * longest / original) - (scaling.factor - 1)
    theta: float = model.rope_theta * growth ** (width / (width - 2))
    return theta**-exponents


def _llama3(plain: Tensor, scaling: RopeScaling, original: int) -> Tensor:
    """Pairs that turn seldom within the original length are stretched, those that turn often are kept."""
    wavelengths = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def _yarn(model: ModelSpec, plain: Tensor, scaling: RopeScaling, original: int) -> Tensor:
    """As llama3, with a ramp over the pairs between two numbers of turns (arXiv:2309.00071, section 3.2)."""
    width = model.rotary_width

    def pair_that_turns(times: float) -> float:
        return width * math.log(original / (times * 2 * math.pi)) / (2 * math.log(model.rope_theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    pairs = torch.arange(width // 2, device=plain.device, dtype=plain.dtype)
    ramp = ((pairs - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def _yarn_warmth(scaling: RopeScaling) -> float:
    """arXiv:2309.00071, equation 22: longer contexts attend with a higher temperature."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def warmth(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return warmth(scaling.mscale) / warmth(scaling.mscale_all_dim)
    return warmth(1.0)


def _longrope_warmth(model: ModelSpec, scaling: RopeScaling, original: int) -> float:
    """arXiv:2402.13753 as published with Phi-3: sqrt(1 + ln(s) / ln(original length)), s the stretch."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    stretch = model.max_position_embeddings / original
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
