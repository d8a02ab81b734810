"""How are rotary positions stretched beyond the length they were trained for?"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from triax.spec.value import Count, Value, as_tuple

Factors = Annotated[tuple[float, ...], BeforeValidator(as_tuple)]


class RopeScaling(Value):
    """A way to stretch; fields in Hugging Face's names.

    linear: positions divided by ``factor`` (Chen et al. 2023, arXiv:2306.15595). dynamic: the base grows with the
    length beyond the original one. llama3: slow turns stretched, fast ones kept (Llama 3.1's model card). yarn: the
    same, ramped, with warmer attention (Peng et al. 2023, arXiv:2309.00071). longrope: a factor for each pair, one set
    for sequences within the original length and one for longer ones (Ding et al. 2024, arXiv:2402.13753).
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float = Field(default=1.0, gt=0)
    original_max_position_embeddings: Count | None = Field(default=None, ge=1)
    """The length that the unstretched positions were trained for; absent means the model's longest."""
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    truncate: bool = True
    """yarn: bounds of the ramp at whole pairs."""
    attention_factor: float | None = Field(default=None, gt=0)
    """yarn, longrope: cosines and sines are multiplied by this; absent means the paper's function of the stretch."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: Factors = ()
    long_factor: Factors = ()
