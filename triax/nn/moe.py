"""What if each token had a feed-forward network of its own choice? A mixture of experts, in which no token is dropped.

Shapes by the glossary: T tokens, D hidden, F inside an expert, E experts, K experts of a token, C = T x K choices.

    router: T tokens -> scores (T, E) -> the K best, with a weight each
    rows of x, one for each choice and ordered by expert (C, D) -> experts -> (C, D) -> weighted sums (T, D)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triax.nn.balance import Balance, Choice
from triax.nn.card import is_on_card
from triax.nn.feed_forward import ACTIVATIONS, FeedForward
from triax.spec.experts import ExpertSpec
from triax.spec.model import ModelSpec

_LEAST_SUM: Final = 1e-20
"""Added to a sum of sigmoids before something is divided by it, as DeepSeek-V3 does: all of them may be zero."""
_GROUPED_BYTES: Final = 16
"""Rows of all factors of a grouped matmul must be multiples of this."""


class MixtureOfExperts(nn.Module):
    """Many feed-forward networks, of which each token goes through those that the router chooses for it; and, in some
    models, one that every token goes through."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        assert model.experts is not None
        experts = model.experts
        self.gate = Router(model.hidden_size, experts)
        self.experts = Experts(model, experts)
        self.exchange = Exchange()
        shared = experts.shared_expert_intermediate_size
        self.shared_experts = FeedForward(model, shared, has_bias=False) if shared else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return (B, S, D)."""
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_BSD)
        order = Order.by_expert(chosen_TK, self.gate.num_experts)
        rows_CD, counts_E, way_back = self.exchange.send(order.spread(x_TD), order.counts_E)
        rows_CD = self.exchange.receive(self.experts(rows_CD, counts_E), way_back)
        mixed_TD = torch.bmm(weights_TK.unsqueeze(1).to(x_TD.dtype), order.collect(rows_CD)).squeeze(1)
        mixed_BSD = mixed_TD.view_as(x_BSD)
        return mixed_BSD if self.shared_experts is None else mixed_BSD + self.shared_experts(x_BSD)


class Router(nn.Module):
    """Scores every expert for every token, in at least fp32, and chooses."""

    def __init__(self, hidden: int, experts: ExpertSpec) -> None:
        super().__init__()
        self.spec = experts
        self.num_experts = experts.num_experts
        self.weight = nn.Parameter(torch.empty(experts.num_experts, hidden))
        bias = nn.Parameter(torch.zeros(experts.num_experts), requires_grad=False) if experts.selection_bias else None
        self.e_score_correction_bias = bias
        self.selection = Selection(experts)
        self.balance = Balance(experts)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each token the weights of its experts (T, K) and which they are (T, K)."""
        wide = torch.promote_types(x_BSD.dtype, torch.float32)
        logits_BSE = F.linear(x_BSD.to(wide), self.matrix().to(wide))
        scores_BSE = logits_BSE.softmax(dim=-1) if self.spec.scoring_func == "softmax" else logits_BSE.sigmoid()
        chosen_BSK = self._chosen(scores_BSE.detach())
        weights_BSK = scores_BSE.gather(-1, chosen_BSK)
        if self.spec.norm_topk_prob:
            least = _LEAST_SUM if self.spec.scoring_func == "sigmoid" else 0.0
            weights_BSK = weights_BSK / (weights_BSK.sum(dim=-1, keepdim=True) + least)
        weights_BSK = self.balance.attach(weights_BSK, Choice(logits_BSE, scores_BSE, chosen_BSK))
        return weights_BSK.flatten(0, 1) * self.spec.routed_scaling_factor, chosen_BSK.flatten(0, 1)

    def matrix(self) -> Tensor:
        """Return the weight (E, D) as it is multiplied."""
        return self.weight

    def _chosen(self, scores_BSE: Tensor) -> Tensor:
        """Return the indices of the experts of each token, (B, S, K), best first."""
        bias = self.e_score_correction_bias
        return self.selection.best(scores_BSE if bias is None else scores_BSE + bias.to(scores_BSE.dtype))


class Selection:
    """Which experts does a token go through: those that it wishes for most."""

    def __init__(self, experts: ExpertSpec) -> None:
        self._spec = experts

    def best(self, wishes_BSE: Tensor) -> Tensor:
        """Return the indices (B, S, K) of the experts that each token goes through, best first."""
        if self._spec.n_group > 1:
            groups = wishes_BSE.unflatten(-1, (self._spec.n_group, -1))
            best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(self._spec.topk_group, dim=-1).indices
            is_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, value=False)
            wishes_BSE = groups.masked_fill(is_out.unsqueeze(-1), -torch.inf).flatten(-2)
        return wishes_BSE.topk(self._spec.num_experts_per_tok, dim=-1).indices


class Experts(nn.Module):
    """The matrices of all experts, or of those that are here: of each kind one weight, one expert below the other."""

    def __init__(self, model: ModelSpec, experts: ExpertSpec) -> None:
        super().__init__()
        self.hidden, self.inner = model.hidden_size, experts.moe_intermediate_size
        count = experts.num_experts
        self.gate_proj = nn.Parameter(torch.empty(count * self.inner, self.hidden))
        self.up_proj = nn.Parameter(torch.empty(count * self.inner, self.hidden))
        self.down_proj = nn.Parameter(torch.empty(count * self.hidden, self.inner))
        self.activation = ACTIVATIONS[model.hidden_act]

    def forward(self, rows_CD: Tensor, counts_E: Tensor) -> Tensor:
        """Return what experts make of their rows (C, D): the first ``counts[0]`` are those of the first expert, and so
        on. An expert without rows takes part with none, so that it has a gradient of zero."""
        gate_EFD, up_EFD, down_EDF = (
            self.matrices(weight).unflatten(0, (-1, rows))
            for weight, rows in (
                (self.gate_proj, self.inner),
                (self.up_proj, self.inner),
                (self.down_proj, self.hidden),
            )
        )
        multiply = self.multiplier(rows_CD)
        inside_CF = self.activation(multiply(rows_CD, gate_EFD, counts_E)) * multiply(rows_CD, up_EFD, counts_E)
        return multiply(inside_CF, down_EDF, counts_E)

    def multiplier(self, rows_CD: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return how rows are multiplied by the matrices of their experts."""
        return grouped if can_group(rows_CD, self.inner) else one_by_one

    def matrices(self, weight: Tensor) -> Tensor:
        """Return ``weight`` as it is multiplied."""
        return weight


def can_group(rows_CD: Tensor, inner: int) -> bool:
    """Return whether torch's grouped matmul takes these rows, and what becomes of them at width ``inner``."""
    dtypes = (torch.bfloat16,) if is_on_card(rows_CD) else (torch.bfloat16, torch.float32)
    fits = all(width * rows_CD.element_size() % _GROUPED_BYTES == 0 for width in (rows_CD.shape[1], inner))
    return rows_CD.dtype in dtypes and fits


def grouped(rows_CI: Tensor, matrices_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Return each row times the matrix of its expert, (C, O), in one kernel; the host need not know the counts."""
    ends_E = counts_E.cumsum(0).to(torch.int32)
    return F.grouped_mm(rows_CI, matrices_EOI.transpose(1, 2), offs=ends_E)


def one_by_one(rows_CI: Tensor, matrices_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Return the same by one matmul for each expert, in any precision."""
    rows_of_each = rows_CI.split(counts_E.tolist())
    return torch.cat([F.linear(rows, one) for rows, one in zip(rows_of_each, matrices_EOI.unbind(), strict=True)])


@dataclass(frozen=True, slots=True)
class Order:
    """The choices of all tokens, ordered by expert; those of one expert stay in the order of their tokens."""

    places_C: Tensor
    """``places[i]`` is the choice that comes ``i``-th; choice ``t * K + k`` is the ``k``-th of token ``t``."""
    back_C: Tensor
    """The inverse."""
    counts_E: Tensor
    """Choices of each expert."""
    per_token: int

    @classmethod
    def by_expert(cls, chosen_TK: Tensor, num_experts: int) -> "Order":
        """Return the order of the choices ``chosen`` among experts 0 to ``num_experts`` - 1."""
        expert_C = chosen_TK.flatten()
        places_C = expert_C.argsort(stable=True)
        back_C = torch.empty_like(places_C).scatter_(0, places_C, torch.arange(len(places_C), device=places_C.device))
        counts_E = torch.zeros(num_experts, dtype=torch.int64, device=places_C.device)
        counts_E.scatter_add_(0, expert_C, torch.ones_like(expert_C))
        return cls(places_C, back_C, counts_E, chosen_TK.shape[1])

    def spread(self, x_TD: Tensor) -> Tensor:
        """Return the row of its token for each choice, in order, (C, D)."""
        rows: Tensor = _Spread.apply(x_TD, self.places_C, self.back_C, self.per_token)  # type: ignore[no-untyped-call]
        return rows

    def collect(self, rows_CD: Tensor) -> Tensor:
        """Return the rows of each token, (T, K, D)."""
        rows_TKD: Tensor = permuted(rows_CD, self.back_C, self.places_C).unflatten(0, (-1, self.per_token))
        return rows_TKD


class _Spread(torch.autograd.Function):
    """Its backward adds the K rows of each token in their order: torch's own adds them as they come."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, places_C: Tensor, back_C: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(back_C)
        ctx.per_token = per_token
        return x_TD[places_C // per_token]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (back_C,) = ctx.saved_tensors
        return grad_outputs[0][back_C].unflatten(0, (-1, ctx.per_token)).sum(dim=1), None, None, None


def permuted(rows_CD: Tensor, places_C: Tensor, back_C: Tensor) -> Tensor:
    """Return ``rows[places]``; ``back`` is the inverse, and the backward, where torch's own would add rows up."""
    moved: Tensor = _Permuted.apply(rows_CD, places_C, back_C)  # type: ignore[no-untyped-call]
    return moved


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_CD: Tensor, places_C: Tensor, back_C: Tensor) -> Tensor:
        ctx.save_for_backward(back_C)
        return rows_CD[places_C]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (back_C,) = ctx.saved_tensors
        return grad_outputs[0][back_C], None, None


class Exchange:
    """How rows reach the ranks of their experts and come back: on one device all experts are here."""

    def send(self, rows_CD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return the rows for the experts that are here, ordered by these; how many each has; and the way back."""
        return rows_CD, counts_E, None

    def receive(self, rows_CD: Tensor, way_back: Any) -> Tensor:
        """Return to each rank what experts made of the rows it sent, in the order in which it sent them."""
        return rows_CD
