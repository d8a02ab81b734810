"""How many floating-point operations does one token cost, term by term, so that utilisation can be checked by hand?

One formula, for the plan and for the running job. It counts *model* FLOPs, as MFU does (Chowdhery et al. 2022,
arXiv:2204.02311, appendix B): the operations that the mathematics needs. Activations computed again in the backward are
not counted; with them it would be hardware utilisation, HFU (Korthikanti et al. 2022, arXiv:2205.05198).

What is counted, for each token, a multiply-add being 2 operations:

- each weight matrix that the token is multiplied by: 2 x its numbers. The rows come from the weights table, so a matrix
  that the network has is never missing here. Looking a row up in the embedding costs nothing. Of experts, those that a
  token goes through count.
- attention scores: 2 x heads x head width x attended positions for queries times keys, and as much for scores times
  values. *Attended* is counted exactly: a causal token sees itself and what comes before it, (S + 1) / 2 positions on
  average, fewer inside a window or a short document.
- the backward costs twice the forward (a gradient for the input and one for the weight of each matmul), hence x 3.

Element-wise work (norms, rotary embedding, softmax, activation, loss, optimizer) is not counted, as nobody counts it.

The usual other convention, ``6 P + 12 L N H S`` (PaLM appendix B; nanoGPT), counts every weight, lookups included, and
attention as if every position saw all S. It is always the larger number and is given beside ours for comparison.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from triax.spec.model import ModelSpec
from triax.spec.weights import Role, num_active_parameters, weights_table

_FORWARD_AND_BACKWARD: Final = 3

_TERM_OF_ROLE: Final[dict[Role, str]] = {
    "embedding": "head",  # counted where the table calls it a matmul: tied, it is the head
    "head": "head",
    "attention_q": "attention projections",
    "attention_k": "attention projections",
    "attention_v": "attention projections",
    "attention_out": "attention projections",
    "mlp_gate": "mlp",
    "mlp_up": "mlp",
    "mlp_down": "mlp",
    "router": "router",
    "expert_gate": "experts",
    "expert_up": "experts",
    "expert_down": "experts",
}


@dataclass(frozen=True, slots=True)
class FlopTerm:
    """One part of the cost of a token."""

    name: str
    formula: str
    """How ``per_token`` comes about, in numbers a reader can multiply."""
    per_token: float
    """FLOPs of one token, forward and backward."""


def mean_attended(lengths: Iterable[int], window: int | None = None) -> float:
    """Return how many positions a causal token attends to on average, itself included.

    ``lengths`` are the documents that attention stays inside: ``[seq_len]`` where it crosses documents. A position with
    i positions before it attends to i + 1 of them, and to at most ``window``.
    """
    attended = positions = 0
    for length in lengths:
        seen = length if window is None else min(length, window)
        attended += seen * (seen + 1) // 2 + (length - seen) * seen
        positions += length
    if positions == 0:
        raise ValueError("there is no position to average over: give at least one length above zero")
    return attended / positions


def attended_by(model: ModelSpec, lengths: Iterable[int]) -> float:
    """Return ``mean_attended`` over ``lengths``, averaged over the layers, of which some may see a window only."""
    documents = tuple(lengths)
    num_local = sum(model.reach(layer) == "local" for layer in range(model.num_hidden_layers))
    num_global = model.num_hidden_layers - num_local
    seen = num_global * mean_attended(documents) + num_local * mean_attended(documents, model.sliding_window)
    return seen / model.num_hidden_layers


def flop_terms(model: ModelSpec, attended: float) -> tuple[FlopTerm, ...]:
    """Return what one token costs in training, forward and backward, in the order of the network.

    ``attended`` is the mean number of positions a token attends to in a layer, see ``attended_by``.
    """
    numbers: dict[str, int] = {}
    for weight in weights_table(model):
        if weight.is_matmul:
            # A role this table does not name becomes a term of its own name: it is never lost.
            term = _TERM_OF_ROLE.get(weight.role, weight.role)
            numbers[term] = numbers.get(term, 0) + weight.numel_per_token
    factor = _FORWARD_AND_BACKWARD
    matmuls = {
        name: FlopTerm(name, f"{factor} x 2 x {count:,} weights", factor * 2.0 * count)
        for name, count in numbers.items()
    }
    layers, heads, width = model.num_hidden_layers, model.num_attention_heads, model.head_width
    scores = FlopTerm(
        "attention scores",
        f"{factor} x 4 x {layers} layers x {heads} heads x {width} wide x {attended:,.6g} attended",
        factor * 4.0 * layers * heads * width * attended,
    )
    lookup = FlopTerm("embedding lookup", "0, a copy", 0.0)
    head = matmuls.pop("head")
    projections = matmuls.pop("attention projections")
    return (lookup, projections, scores, *matmuls.values(), head)


def flops_per_token(model: ModelSpec, attended: float) -> float:
    """Return the FLOPs of one token in training: the sum of ``flop_terms``."""
    return sum(term.per_token for term in flop_terms(model, attended))


def palm_flops_per_token(model: ModelSpec, seq_len: int) -> float:
    """Return ``6 P + 12 L N H S`` (arXiv:2204.02311, appendix B), P being weights that a token meets:
    the number others report."""
    attention = 12.0 * model.num_hidden_layers * model.num_attention_heads * model.head_width * seq_len
    return 6.0 * num_active_parameters(model) + attention


def describe_flops(model: ModelSpec, seq_len: int, attended: float | None = None) -> str:
    """Return the count as a page: one line a term, the sum, and the other convention beside it.

    ``attended`` is what was measured where attention stays inside documents; absent means causal over ``seq_len``.
    """
    terms = flop_terms(model, attended_by(model, [seq_len]) if attended is None else attended)
    total = sum(term.per_token for term in terms)
    palm = palm_flops_per_token(model, seq_len)
    lines = ["FLOPs per token, forward and backward; recomputed activations are not counted"]
    lines += [_line(term.name, term.per_token, total, term.formula) for term in terms]
    lines.append(_line("sum", total, total, "counted here"))
    other = (
        f"6 x {num_active_parameters(model):,} weights + 12 x layers x heads x width x {seq_len:,} "
        f"(PaLM appendix B: not causal, lookup counted)"
    )
    lines.append(_line("other convention", palm, total, other))
    return "\n".join(lines)


def _line(name: str, flops: float, total: float, formula: str) -> str:
    return f"  {name:<22}{flops:>20,.0f}  {flops / total:>6.1%}  = {formula}"
