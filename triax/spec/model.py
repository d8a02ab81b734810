"""Which network is trained? Dimensions in the field names of Hugging Face's ``config.json``."""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from triax.spec.experts import ExpertSpec
from triax.spec.legal_values import divisors, either, nearest
from triax.spec.rope import RopeScaling
from triax.spec.value import Count, Counts, Value

NormPlacement = Literal["pre", "post", "both"]
Reach = Literal["global", "local"]
"""Which positions a layer sees: all before it, or those of its window."""


class ModelSpec(Value):
    """A decoder of the Llama family.

    Relatives are settings of this value, never branches in the network. Letters as in the glossary: D hidden_size,
    F intermediate_size, L num_hidden_layers, N num_attention_heads, K num_key_value_heads, H head_dim, V vocab_size.
    The upper limits lie far above any model; they keep a slip of the pen from filling the memory.
    """

    family: str = Field(default="llama", min_length=1, max_length=40)
    """Hugging Face's ``model_type``: decides names on export alone."""
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
    hidden_act: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    attention_bias: bool = False
    """Biases on the projections of queries, keys and values."""
    attention_out_bias: bool = False
    mlp_bias: bool = False
    """Biases in feed-forward networks; experts have none, nor have shared ones."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """A norm of queries and keys before they turn: of each head, or of all heads together."""
    norm_placement: NormPlacement = "pre"
    """pre: each block reads a norm of the residual stream. post: what it writes is normalised. both."""
    norm_is_offset: bool = False
    """Norm weights are stored as their difference from one."""
    rope_scaling: RopeScaling | None = None
    rope_local_theta: float | None = Field(default=None, gt=1)
    """The base of local layers, which are never stretched; absent means that they turn like the others."""
    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1)
    """The first part of each head that turns."""
    layers_without_rope: Counts = ()
    """Layers that know no positions."""
    sliding_window: Count | None = Field(default=None, ge=1)
    """Positions that a local layer sees, itself included; absent means that all layers are global."""
    global_layers: Counts = ()
    """Layers that see everything although there is a window."""
    embedding_multiplier: float = Field(default=1.0, gt=0)
    attention_multiplier: float | None = Field(default=None, gt=0)
    """Scale of attention scores; absent means 1/sqrt(H)."""
    residual_multiplier: float = Field(default=1.0, gt=0)
    """Scale of what each block adds to the residual stream."""
    logits_scaling: float = Field(default=1.0, gt=0)
    """Logits are divided by this."""
    experts: ExpertSpec | None = None
    """What stands in place of the feed-forward network in the layers that have experts; absent means none has."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        faults = [*self._width_faults(), *self._group_faults()]
        faults += [*self._turning_faults(), *self._layer_faults()] if not faults else []
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

    def _turning_faults(self) -> list[str]:
        turning = self.rotary_width
        if turning % 2 or not turning:
            return [
                f"partial_rotary_factor={self.partial_rotary_factor} turns {turning} of {self.head_width} numbers, and "
                f"rotary embedding turns pairs: use a factor that turns an even number of them."
            ]
        return [] if self.rope_scaling is None else self._stretching_faults(self.rope_scaling, turning)

    def _stretching_faults(self, scaling: RopeScaling, turning: int) -> list[str]:
        if scaling.kind == "dynamic" and turning == 2:
            return ["rope_scaling.kind=dynamic stretches from the second pair on, and only one turns: use linear."]
        if scaling.kind != "longrope":
            return []
        original = self.unstretched_length
        if original == 1:
            return ["rope_scaling.original_max_position_embeddings=1 leaves nothing to stretch: use 2 or more."]
        given = {"short_factor": scaling.short_factor, "long_factor": scaling.long_factor}
        return [
            f"rope_scaling.{name} has {len(factors)} factors, and {turning // 2} pairs turn: give {turning // 2}, "
            f"each above zero."
            for name, factors in given.items()
            if len(factors) != turning // 2 or min(factors) <= 0
        ]

    def _layer_faults(self) -> list[str]:
        last = self.num_hidden_layers - 1
        return [
            f"{key} names layer {layer}, and there are layers 0 to {last}."
            for key in ("layers_without_rope", "global_layers")
            for layer in getattr(self, key)
            if not 0 <= layer <= last
        ][:1] + self._expert_faults()

    def _expert_faults(self) -> list[str]:
        return [] if self.experts is None else self.experts.layer_faults(self.num_hidden_layers)

    @property
    def kv_heads(self) -> int:
        """K: heads of keys and values."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_width(self) -> int:
        """H: numbers in one head."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def rotary_width(self) -> int:
        """Numbers of a head that turn with its position."""
        return int(self.head_width * self.partial_rotary_factor)

    @property
    def unstretched_length(self) -> int:
        """The length that rotary positions were made for before they were stretched."""
        original = None if self.rope_scaling is None else self.rope_scaling.original_max_position_embeddings
        return self.max_position_embeddings if original is None else original

    @property
    def sparse_layers(self) -> Sequence[int]:
        """Layers with experts, ascending."""
        return () if self.experts is None else self.experts.sparse_layers(self.num_hidden_layers)

    @property
    def feed_forward_widths(self) -> dict[str, int]:
        """F of each kind of feed-forward network that all tokens of a layer go through, by the name of its field."""
        widths = {}
        if self.experts is None or len(self.sparse_layers) < self.num_hidden_layers:
            widths["intermediate_size"] = self.intermediate_size
        if self.experts is not None and self.experts.shared_expert_intermediate_size:
            widths["experts.shared_expert_intermediate_size"] = self.experts.shared_expert_intermediate_size
        return widths

    def reach(self, layer: int) -> Reach:
        """Return whether ``layer`` sees all positions before it or those of its window."""
        return "global" if self.sliding_window is None or layer in self.global_layers else "local"
