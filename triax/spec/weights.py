"""Which weights does a model have: one row for each, and the only place where their shapes are written.

Memory, compute, tensor parallelism, initialisation, checkpoints and import from Hugging Face all read these rows, and a
test holds them equal to the network's own ``named_parameters()``.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from triax.spec.model import ModelSpec

Role = Literal[
    "embedding", "head", "norm",
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
    """Its name in a Hugging Face folder."""
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


def weights_table(model: ModelSpec) -> tuple[Weight, ...]:
    """Return every weight of ``model`` once, in the order in which a token meets them."""
    hidden, inner = model.hidden_size, model.intermediate_size
    query = model.num_attention_heads * model.head_width
    key_value = model.kv_heads * model.head_width
    layer_rows: tuple[tuple[str, tuple[int, ...], Role, int | None], ...] = (
        ("input_layernorm.weight", (hidden,), "norm", None),
        ("self_attn.q_proj.weight", (query, hidden), "attention_q", 0),
        ("self_attn.k_proj.weight", (key_value, hidden), "attention_k", 0),
        ("self_attn.v_proj.weight", (key_value, hidden), "attention_v", 0),
        ("self_attn.o_proj.weight", (hidden, query), "attention_out", 1),
        ("post_attention_layernorm.weight", (hidden,), "norm", None),
        ("mlp.gate_proj.weight", (inner, hidden), "mlp_gate", 0),
        ("mlp.up_proj.weight", (inner, hidden), "mlp_up", 0),
        ("mlp.down_proj.weight", (hidden, inner), "mlp_down", 1),
    )
    tied = model.tie_word_embeddings
    table = [_outside("embed_tokens.weight", (model.vocab_size, hidden), "embedding", 0, is_matmul=tied)]
    for layer in range(model.num_hidden_layers):
        for suffix, shape, role, tp_dim in layer_rows:
            name = f"layers.{layer}.{suffix}"
            table.append(Weight(name, shape, role, f"model.{name}", layer, tp_dim, len(shape) > 1))
    table.append(_outside("norm.weight", (hidden,), "norm", None, is_matmul=False))
    if not tied:
        shape = (model.vocab_size, hidden)
        table.append(Weight("lm_head.weight", shape, "head", "lm_head.weight", None, 0, is_matmul=True))
    return tuple(table)


def _outside(name: str, shape: tuple[int, ...], role: Role, tp_dim: int | None, *, is_matmul: bool) -> Weight:
    return Weight(name, shape, role, f"model.{name}", None, tp_dim, is_matmul)


def num_parameters(model: ModelSpec) -> int:
    """Return how many numbers are trained; a tied embedding counts once."""
    return sum(weight.numel for weight in weights_table(model))
