"""Which network is trained? Dimensions in the field names of Hugging Face's ``config.json``."""

from typing import Self

from pydantic import Field, model_validator

from triax.spec.legal_values import divisors, either, nearest
from triax.spec.value import Count, Value


class ModelSpec(Value):
    """A decoder of the Llama family.

    Relatives are settings of this value, never branches in the network. Letters as in the glossary: D hidden_size,
    F intermediate_size, L num_hidden_layers, N num_attention_heads, K num_key_value_heads, H head_dim, V vocab_size.
    The upper limits lie far above any model; they keep a slip of the pen from filling the memory.
    """

    hidden_size: Count = Field(ge=1, le=1 << 20)
    intermediate_size: Count = Field(ge=1, le=1 << 24)
    num_hidden_layers: Count = Field(ge=1, le=1 << 14)
    num_attention_heads: Count = Field(ge=1, le=1 << 16)
    num_key_value_heads: Count | None = Field(default=None, ge=1)
    """Heads of keys and values; absent means as many as query heads (multi-head attention)."""
    head_dim: Count | None = Field(default=None, ge=2, le=1 << 20)
    """Width of one head; absent means hidden_size / num_attention_heads."""
    vocab_size: Count = Field(ge=2, le=1 << 31)
    max_position_embeddings: Count = Field(default=1 << 20, ge=1)
    """Longest sequence the model is meant for; a longer ``data.seq_len`` is refused."""
    rms_norm_eps: float = Field(default=1e-5, gt=0, lt=1)
    rope_theta: float = Field(default=10000.0, gt=1)
    tie_word_embeddings: bool = False
    """True: the head uses the embedding matrix, and there is no ``lm_head.weight``."""
    initializer_range: float = Field(default=0.02, gt=0, le=1)
    """Standard deviation of initial weights, see ``triax.nn.init``."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        faults = [*self._width_faults(), *self._group_faults()]
        if faults:
            raise ValueError("\n".join(faults))
        return self

    def _width_faults(self) -> list[str]:
        heads, hidden = self.num_attention_heads, self.hidden_size
        if self.head_dim is None and hidden % heads:
            fitting = [divisor for divisor in divisors(hidden) if hidden // divisor % 2 == 0]
            fewer = f"use {either(nearest(fitting, heads))} heads, or " if fitting else ""
            return [f"num_attention_heads={heads} does not divide hidden_size={hidden}: {fewer}give head_dim."]
        if self.head_width % 2:
            asked = f"head_dim={self.head_width}"
            if self.head_dim is None:
                asked = f"hidden_size={hidden} / num_attention_heads={heads} = {self.head_width}"
            even = either(width for width in (self.head_width - 1, self.head_width + 1) if width)
            return [f"{asked} is odd, and rotary embedding turns pairs of numbers: use head_dim={even}."]
        return []

    def _group_faults(self) -> list[str]:
        if self.num_attention_heads % self.kv_heads == 0:
            return []
        fitting = either(nearest(divisors(self.num_attention_heads), self.kv_heads))
        return [
            f"num_key_value_heads={self.kv_heads} does not divide num_attention_heads={self.num_attention_heads}: "
            f"use {fitting}."
        ]

    @property
    def kv_heads(self) -> int:
        """K: heads of keys and values."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_width(self) -> int:
        """H: numbers in one head."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim
