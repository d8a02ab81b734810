"""Which weights does a model have: one row for each, and the only place where their shapes are written.

Memory, compute, tensor parallelism, initialisation, checkpoints and import from Hugging Face all read these rows, and a
test holds them equal to the network's own ``named_parameters()``.
"""

from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from triax.spec.model import ModelSpec, NormPlacement

Role = Literal[
    "embedding", "head", "norm", "bias",
    "attention_q", "attention_k", "attention_v", "attention_out",
    "mlp_gate", "mlp_up", "mlp_down",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight matrix or vector, whole, as one device would hold it."""

    name: str
    """Its name in the network, in checkpoints and in logs; the same in every layout."""
    shape: tuple[int, ...]
    role: Role
    hf_name: str
    """Its name in a Hugging Face folder; some families fuse tensors, see ``triax.spec.huggingface.tensor_sources``."""
    layer: int | None
    """Index of its layer; None for the embedding, the last norm and the head."""
    tp_dim: int | None
    """The dim tensor parallelism cuts: 0 splits outputs (column), 1 splits inputs (row), None keeps it whole."""
    is_matmul: bool
    """True where every token is multiplied by it (a tied embedding is: it is also the head)."""

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)

    @property
    def decays(self) -> bool:
        """True where weight decay applies: matrices, not norms and biases."""
        return len(self.shape) > 1


LAYER_NORMS: Final[dict[NormPlacement, tuple[str | None, str | None, str | None, str | None]]] = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
}  # fmt: skip
"""Names of a layer's norms: before and after attention, before and after feed-forward."""


def weights_table(model: ModelSpec) -> tuple[Weight, ...]:
    """Return every weight of ``model`` once, in the order in which a token meets them."""
    tied = model.tie_word_embeddings
    vocabulary = (model.vocab_size, model.hidden_size)
    table = [_outside("embed_tokens.weight", vocabulary, "embedding", 0, is_matmul=tied)]
    rows = _layer_rows(model)
    for layer in range(model.num_hidden_layers):
        for suffix, shape, role, tp_dim in rows:
            name = f"layers.{layer}.{suffix}"
            table.append(Weight(name, shape, role, f"model.{name}", layer, tp_dim, len(shape) > 1))
    table.append(_outside("norm.weight", (model.hidden_size,), "norm", None, is_matmul=False))
    if not tied:
        table.append(Weight("lm_head.weight", vocabulary, "head", "lm_head.weight", None, 0, is_matmul=True))
    return tuple(table)


_Row = tuple[str, tuple[int, ...], Role, int | None]


def _layer_rows(model: ModelSpec) -> list[_Row]:
    """Return (name within the layer, shape, role, dim cut by tensor parallelism) of one layer's weights."""
    hidden, inner, width = model.hidden_size, model.intermediate_size, model.head_width
    query, key_value = model.num_attention_heads * width, model.kv_heads * width
    before_attention, after_attention, before_mlp, after_mlp = LAYER_NORMS[model.norm_placement]
    rows = _norm_rows(before_attention, hidden)
    projections: tuple[tuple[str, Role, int], ...] = (
        ("q", "attention_q", query), ("k", "attention_k", key_value), ("v", "attention_v", key_value),
    )  # fmt: skip
    for name, role, outputs in projections:
        rows += _linear_rows(f"self_attn.{name}_proj", (outputs, hidden), role, 0, has_bias=model.attention_bias)
    if model.qk_norm != "none":
        is_full = model.qk_norm == "full"
        rows += _norm_rows("self_attn.q_norm", query if is_full else width)
        rows += _norm_rows("self_attn.k_norm", key_value if is_full else width)
    rows += _linear_rows("self_attn.o_proj", (hidden, query), "attention_out", 1, has_bias=model.attention_out_bias)
    rows += _norm_rows(after_attention, hidden) + _norm_rows(before_mlp, hidden)
    rows += _linear_rows("mlp.gate_proj", (inner, hidden), "mlp_gate", 0, has_bias=model.mlp_bias)
    rows += _linear_rows("mlp.up_proj", (inner, hidden), "mlp_up", 0, has_bias=model.mlp_bias)
    rows += _linear_rows("mlp.down_proj", (hidden, inner), "mlp_down", 1, has_bias=model.mlp_bias)
    return rows + _norm_rows(after_mlp, hidden)


def _norm_rows(name: str | None, width: int) -> list[_Row]:
    return [] if name is None else [(f"{name}.weight", (width,), "norm", None)]


def _linear_rows(name: str, shape: tuple[int, int], role: Role, tp_dim: int, *, has_bias: bool) -> list[_Row]:
    """A bias is cut with the outputs it is added to; where inputs are cut, it is added once, whole."""
    rows: list[_Row] = [(f"{name}.weight", shape, role, tp_dim)]
    return [*rows, (f"{name}.bias", shape[:1], "bias", 0 if tp_dim == 0 else None)] if has_bias else rows


def _outside(name: str, shape: tuple[int, ...], role: Role, tp_dim: int | None, *, is_matmul: bool) -> Weight:
    return Weight(name, shape, role, f"model.{name}", None, tp_dim, is_matmul)


def num_parameters(model: ModelSpec) -> int:
    """Return how many numbers are trained; a tied embedding counts once."""
    return sum(weight.numel for weight in weights_table(model))
