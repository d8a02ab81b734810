"""Do tokens spread over experts, and what does it cost where they do not?

Two penalties, each a mean over the sequences of a step, so that they do not depend on how the step is cut into
microbatches and ranks (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20; ST-MoE, arXiv:2202.08906, equation 5). For a
sequence of S tokens that choose K of E experts each:

    balance = sum over experts of f P     f = E / (K S) x how often it was chosen, P = its mean score of the sequence
    z = mean over tokens of log-sum-exp(logits)^2

Scores sum to one for each token; those of sigmoids are divided by their sum first. f has no gradient: it counts. A
balanced sequence has balance 1, and one whose tokens all choose alike has up to E / K.

Penalties reach the gradient where they arise. A pipeline has one loss at its end, and a layer's penalty is none of it:
``Balance.attach`` lets the gradient of the penalty in beside that of the loss when the backward comes by.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from triax.spec.experts import ExpertSpec


@dataclass(frozen=True, slots=True)
class Choice:
    """What the router of one layer made of a microbatch: B sequences of S positions, or this rank's part of them."""

    logits_BSE: Tensor
    scores_BSE: Tensor
    chosen_BSK: Tensor
    """Indices of the experts that each token goes through."""


class Balance:
    """How the tokens of one layer spread: penalties into the gradient, and a tally of what was seen in backwards."""

    parts = 1
    """How many ranks have a part of each sequence."""

    def __init__(self, experts: ExpertSpec) -> None:
        self._experts = experts
        self.sequence_weight = 0.0
        """What the penalty of one sequence counts for in the gradient: one over the sequences of a step. Zero, as long
        as nobody has said how many there are: no penalty then."""
        self._tally: Tensor | None = None

    def over_parts(self, counts_BE: Tensor) -> Tensor:
        """Return the sum over all ranks that have a part of these sequences."""
        return counts_BE

    def attach(self, weights: Tensor, choice: Choice) -> Tensor:
        """Return ``weights``, whose backward also lets in the gradient of the penalties, and counts."""
        experts, (_, length, num_experts) = self._experts, choice.scores_BSE.shape
        counts_BE = choice.scores_BSE.new_zeros(choice.scores_BSE.shape[0], num_experts)
        chosen_BC = choice.chosen_BSK.flatten(1)
        counts_BE.scatter_add_(1, chosen_BC, torch.ones_like(chosen_BC, dtype=counts_BE.dtype))
        tokens = length * self.parts
        often_BE = self.over_parts(counts_BE.clone()) * (num_experts / (experts.num_experts_per_tok * tokens))
        shares_BSE = choice.scores_BSE
        if experts.scoring_func == "sigmoid":
            shares_BSE = F.normalize(shares_BSE, p=1.0, dim=-1)
        balance = (often_BE * shares_BSE.sum(dim=1)).sum() / tokens
        z = choice.logits_BSE.logsumexp(dim=-1).square().sum() / tokens
        penalty = balance.new_zeros(())
        for coefficient, mean in ((experts.router_aux_loss_coef, balance), (experts.router_z_loss_coef, z)):
            if coefficient and self.sequence_weight:
                penalty = penalty + self.sequence_weight * coefficient * mean
        seen = torch.cat((counts_BE.sum(dim=0), torch.stack((balance, z)))).detach().to(torch.float64)
        attached: Tensor = _Attached.apply(weights, penalty, seen, self)  # type: ignore[no-untyped-call]
        return attached

    def add(self, seen: Tensor) -> None:
        """Add what one microbatch has shown to the tally."""
        self._tally = seen if self._tally is None else self._tally + seen

    def take(self, device: torch.device) -> Tensor:
        """Return what was seen since the last call, (E + 2) in fp64: how often each expert was chosen by tokens that
        are here, and the sums of balance and z over sequences, of tokens that are here."""
        tally, self._tally = self._tally, None
        size = self._experts.num_experts + 2
        return torch.zeros(size, dtype=torch.float64, device=device) if tally is None else tally


class _Attached(torch.autograd.Function):
    """The identity of its first input; the gradient of its second is one.

    It counts in the backward, since a forward may be run again, or for nothing but its loss.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, penalty: Tensor, seen: Tensor, balance: Balance) -> Tensor:
        ctx.save_for_backward(penalty, seen)
        ctx.balance = balance
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        penalty, seen = ctx.saved_tensors
        ctx.balance.add(seen)
        return grad_outputs[0], torch.ones_like(penalty), None, None
