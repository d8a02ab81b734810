"""Which weights does a model have: one row for each, and the only place where their shapes are written.

Memory, compute, tensor parallelism, initialisation, checkpoints and import from Hugging Face all read these rows, and a
test holds them equal to the network's own ``named_parameters()``.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Final, Literal

from triax.spec.experts import ExpertSpec
from triax.spec.model import ModelSpec, NormPlacement

Role = Literal[
    "embedding", "head", "norm", "bias",
    "attention_q", "attention_k", "attention_v", "attention_out",
    "mlp_gate", "mlp_up", "mlp_down",
    "router", "selection_bias", "expert_gate", "expert_up", "expert_down",
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
    """True where every token is multiplied by it (a tied embedding is: it is also the head), or by experts in it."""
    num_experts: int = 1
    """How many matrices of one shape stand one below the other in its rows: those of the experts, first expert first.
    Expert parallelism cuts between them."""
    num_experts_per_tok: int = 1
    """How many of these a token is multiplied by."""

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)

    @property
    def numel_per_token(self) -> int:
        """How many of its numbers a token meets: all but those of experts that it did not choose."""
        return self.numel // self.num_experts * self.num_experts_per_tok

    @property
    def is_of_experts(self) -> bool:
        """True where expert parallelism cuts it; then tensor parallelism does not."""
        return self.role in ("expert_gate", "expert_up", "expert_down")

    @property
    def decays(self) -> bool:
        """True where weight decay applies: matrices, not norms and biases."""
        return len(self.shape) > 1

    @property
    def is_trained(self) -> bool:
        """False where no gradient moves it: a selection bias follows the load of its experts."""
        return self.role != "selection_bias"


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
    kinds = {is_sparse: _layer_rows(model, is_sparse=is_sparse) for is_sparse in (False, True)}
    sparse = set(model.sparse_layers)
    for layer in range(model.num_hidden_layers):
        for suffix, shape, role, tp_dim in kinds[layer in sparse]:
            name = f"layers.{layer}.{suffix}"
            weight = Weight(name, shape, role, f"model.{name}", layer, tp_dim, len(shape) > 1)
            table.append(_among_experts(weight, model))
    table.append(_outside("norm.weight", (model.hidden_size,), "norm", None, is_matmul=False))
    if not tied:
        table.append(Weight("lm_head.weight", vocabulary, "head", "lm_head.weight", None, 0, is_matmul=True))
    return tuple(table)


_Row = tuple[str, tuple[int, ...], Role, int | None]


def _among_experts(weight: Weight, model: ModelSpec) -> Weight:
    if not weight.is_of_experts or model.experts is None:
        return weight
    experts = model.experts
    return replace(weight, num_experts=experts.num_experts, num_experts_per_tok=experts.num_experts_per_tok)


def _layer_rows(model: ModelSpec, *, is_sparse: bool) -> list[_Row]:
    """Return (name within the layer, shape, role, dim cut by tensor parallelism) of the weights of a layer with experts
    (``is_sparse``) or without."""
    hidden, width = model.hidden_size, model.head_width
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
    if is_sparse and model.experts is not None:
        rows += _expert_rows(model.experts, hidden)
    else:
        rows += _feed_forward_rows("mlp", hidden, model.intermediate_size, has_bias=model.mlp_bias)
    return rows + _norm_rows(after_mlp, hidden)


def _feed_forward_rows(name: str, hidden: int, inner: int, *, has_bias: bool) -> list[_Row]:
    rows = _linear_rows(f"{name}.gate_proj", (inner, hidden), "mlp_gate", 0, has_bias=has_bias)
    rows += _linear_rows(f"{name}.up_proj", (inner, hidden), "mlp_up", 0, has_bias=has_bias)
    return rows + _linear_rows(f"{name}.down_proj", (hidden, inner), "mlp_down", 1, has_bias=has_bias)


def _expert_rows(experts: ExpertSpec, hidden: int) -> list[_Row]:
    """Matrices of all experts are one weight, one below the other: any number of ranks shares its rows evenly."""
    count, inner = experts.num_experts, experts.moe_intermediate_size
    rows: list[_Row] = [("mlp.gate.weight", (count, hidden), "router", None)]
    if experts.selection_bias:
        rows.append(("mlp.gate.e_score_correction_bias", (count,), "selection_bias", None))
    rows += [
        ("mlp.experts.gate_proj", (count * inner, hidden), "expert_gate", None),
        ("mlp.experts.up_proj", (count * inner, hidden), "expert_up", None),
        ("mlp.experts.down_proj", (count * hidden, inner), "expert_down", None),
    ]
    shared = experts.shared_expert_intermediate_size
    return rows + (_feed_forward_rows("mlp.shared_experts", hidden, shared, has_bias=False) if shared else [])


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


def num_active_parameters(model: ModelSpec) -> int:
    """Return how many numbers a token meets: all but those of experts that it did not choose."""
    return sum(weight.numel_per_token for weight in weights_table(model))
