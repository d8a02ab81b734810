"""How many rows does each expert get where no router says it? Equally many: routing is forced to balance."""

from collections.abc import Iterable

import torch
from torch import Tensor

from triax.nn.decoder import Decoder
from triax.nn.moe import Selection
from triax.parallel.expert import mixtures
from triax.spec.experts import ExpertSpec


def force_balance(stages: Iterable[Decoder]) -> None:
    """Let tokens of ``stages`` take turns with all experts, whatever they wish for. Every rank gets the same counts."""
    for stage in stages:
        for _, mixture in mixtures(stage):
            mixture.gate.selection = BalancedSelection(mixture.gate.spec)


class BalancedSelection(Selection):
    """Choice ``c`` of a microbatch is expert ``c`` modulo their number; each token's experts differ."""

    def __init__(self, experts: ExpertSpec) -> None:
        super().__init__(experts)
        self._experts = experts

    def best(self, wishes_BSE: Tensor) -> Tensor:
        """See ``Selection.best``, whose work is done nevertheless."""
        wanted_BSK = super().best(wishes_BSE)
        choices = torch.arange(wanted_BSK.numel(), device=wanted_BSK.device)
        return (choices % self._experts.num_experts).view(wanted_BSK.shape)
