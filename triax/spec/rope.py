"""How are rotary positions stretched beyond the length they were trained for?"""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from triax.spec.value import Count, Value, as_tuple

Factors = Annotated[tuple[float, ...], BeforeValidator(as_tuple)]


Kind = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]


class RopeScaling(Value):
    """A way to stretch; fields in Hugging Face's names.

    linear: positions divided by ``factor`` (Chen et al. 2023, arXiv:2306.15595). dynamic: the base grows with the
    length of a document beyond the original one. llama3: slow turns stretched, fast ones kept (Llama 3.1's model card).
    yarn: the same, ramped, with warmer attention (Peng et al. 2023, arXiv:2309.00071). longrope: a factor for each
    pair, one set for documents within the original length and one for longer ones (Ding et al. 2024,
    arXiv:2402.13753).
    """

    kind: Kind
    factor: float | None = Field(default=None, gt=0)
    """How much longer; absent means the model's longest by the original length, and only yarn and longrope may leave it
    out."""
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
    mscale: float | None = Field(default=None, ge=0)
    mscale_all_dim: float | None = Field(default=None, ge=0)
    short_factor: Factors = ()
    long_factor: Factors = ()

    @model_validator(mode="after")
    def _kind_has_its_numbers(self) -> Self:
        if self.factor is None and self.kind in ("linear", "dynamic", "llama3"):
            raise ValueError(f"kind={self.kind} needs a factor: give how many times longer, such as factor=4.0.")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} must be above low_freq_factor={self.low_freq_factor}: pairs "
                f"that turn more often than the one are kept, those that turn less often than the other are stretched."
            )
        return self
