"""How does attention know where a token stands? Pairs of numbers turn by an angle that grows with the position.

Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and the ways to stretch it, whose sources stand in
``triax.spec.rope``.
"""

import math
from collections.abc import Callable

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
    def at(
        cls, positions_BS: Tensor, cu_seqlens: Tensor | None, model: ModelSpec, reach: Reach, dtype: torch.dtype,
        part: Callable[[Tensor], Tensor] = lambda whole: whole,
    ) -> "Rotation":  # fmt: skip
        """Return the rotation for ``positions`` (B, S) in layers of ``reach``, computed in ``dtype``, at least fp32.

        ``cu_seqlens`` cuts the batch into documents, see ``Attention.forward``; ``positions`` count inside them.
        ``part`` takes from a tensor (B, S, ...) the positions that are wanted.
        """
        wide = torch.promote_types(dtype, torch.float32)
        lengths = _document_lengths(positions_BS, cu_seqlens) if _asks_length(model, reach) else None
        if lengths is not None and lengths.shape[1] > 1:
            lengths = part(lengths)
        pairs, factor = turns(model, reach, lengths, positions_BS.device, wide)
        angles = part(positions_BS).to(wide).unsqueeze(-1) * pairs
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


def _asks_length(model: ModelSpec, reach: Reach) -> bool:
    is_plain = reach == "local" and model.rope_local_theta is not None
    return not is_plain and model.rope_scaling is not None and model.rope_scaling.kind in ("dynamic", "longrope")


def _document_lengths(positions_BS: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the length of each position's document, (B, S, 1) or (1, 1, 1).

    Of the document and not of the batch: its mathematics must not depend on which others share a microbatch.
    """
    batch, length = positions_BS.shape
    if cu_seqlens is None:
        return positions_BS.new_full((1, 1, 1), length)
    lengths = cu_seqlens.diff()
    return lengths.repeat_interleave(lengths, output_size=batch * length).view(batch, length, 1)


def turns(
    model: ModelSpec, reach: Reach, lengths: Tensor | None, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """Return the angle by which each pair turns from one position to the next, and the factor of cos and sin.

    The angles are (H/2,), or (B, S, H/2) where the stretching depends on ``lengths`` (B, S, 1), those of the documents
    that the positions stand in.
    """
    width = model.rotary_width
    exponents = torch.arange(0, width, 2, device=device, dtype=dtype) / width
    if reach == "local" and model.rope_local_theta is not None:
        return model.rope_local_theta**-exponents, 1.0
    plain = model.rope_theta**-exponents
    scaling = model.rope_scaling
    if scaling is None:
        return plain, 1.0
    original = model.unstretched_length
    stretch = model.max_position_embeddings / original if scaling.factor is None else scaling.factor
    match scaling.kind:
        case "linear":
            return plain / stretch, 1.0
        case "dynamic":
            assert lengths is not None
            return _dynamic(model, exponents, stretch, lengths.to(dtype), original), 1.0
        case "llama3":
            return _llama3(plain, scaling, stretch, original), 1.0
        case "yarn":
            return _yarn(model, plain, scaling, stretch, original), _yarn_warmth(scaling, stretch)
        case "longrope":
            assert lengths is not None
            short, long = (
                torch.tensor(factors, device=device, dtype=dtype)
                for factors in (scaling.short_factor, scaling.long_factor)
            )
            return plain / torch.where(lengths > original, long, short), _longrope_warmth(scaling, stretch, original)


def _dynamic(model: ModelSpec, exponents: Tensor, stretch: float, lengths: Tensor, original: int) -> Tensor:
    """The base grows with the length, so that the slowest pair keeps its last angle (NTK-aware scaling, dynamic)."""
    width = model.rotary_width
    growth = stretch * lengths.clamp(min=original) / original - (stretch - 1)
    theta: Tensor = model.rope_theta * growth ** (width / (width - 2))
    return theta**-exponents


def _llama3(plain: Tensor, scaling: RopeScaling, stretch: float, original: int) -> Tensor:
    """Pairs that turn seldom within the original length are stretched, those that turn often are kept."""
    wavelengths = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * plain / stretch + smooth * plain


def _yarn(model: ModelSpec, plain: Tensor, scaling: RopeScaling, stretch: float, original: int) -> Tensor:
    """As llama3, with a ramp over the pairs between two numbers of turns (arXiv:2309.00071, section 3.2)."""
    width = model.rotary_width

    def pair_that_turns(times: float) -> float:
        return width * math.log(original / (times * 2 * math.pi)) / (2 * math.log(model.rope_theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    pairs = torch.arange(width // 2, device=plain.device, dtype=plain.dtype)
    ramp = ((pairs - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
    return plain / stretch * ramp + plain * (1 - ramp)


def _yarn_warmth(scaling: RopeScaling, stretch: float) -> float:
    """arXiv:2309.00071, equation 22: longer contexts attend with a higher temperature."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def warmth(weight: float) -> float:
        return 1.0 if stretch <= 1 else 0.1 * weight * math.log(stretch) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return warmth(scaling.mscale) / warmth(scaling.mscale_all_dim)
    return warmth(1.0)


def _longrope_warmth(scaling: RopeScaling, stretch: float, original: int) -> float:
    """arXiv:2402.13753 as published with Phi-3: sqrt(1 + ln(s) / ln(original length)), s the stretch."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
