"""What do routers cost and learn in a plain loop that shares none of the engine's bookkeeping?"""

from collections.abc import Iterator

import torch
from torch import Tensor

from triax.nn.balance import Balance, Choice
from triax.nn.decoder import Decoder
from triax.nn.moe import MixtureOfExperts, Router


class PlainRouting:
    """Keeps what the routers of a whole network choose; a sequence may come in several documents."""

    def __init__(self, model: Decoder) -> None:
        layers = {f"layers.{index}.mlp": layer.get_submodule("mlp") for index, layer in model.layers.items()}
        mixtures = {name: layer for name, layer in layers.items() if isinstance(layer, MixtureOfExperts)}
        self._names, self._routers = list(mixtures), [mixture.gate for mixture in mixtures.values()]
        self._kept = [_Kept(router) for router in self._routers]
        for router, kept in zip(self._routers, self._kept, strict=True):
            router.balance = kept

    def penalty_of_sequence(self) -> Tensor:
        """Return the penalties of the sequence that has just gone through the network, all layers together."""
        return torch.stack([torch.zeros((), dtype=torch.float64), *(kept.penalty() for kept in self._kept)]).sum()

    def take_routes(self, samples: int) -> dict[str, Tensor]:
        """Return which experts the tokens of the first ``samples`` since the last call chose, (samples, S, K)
        ascending, by the name of the layer's network."""
        routes = {name: torch.stack(kept.routes[:samples]) for name, kept in self._named() if kept.routes[:samples]}
        for _, kept in self._named():
            kept.routes.clear()
        return routes

    def _named(self) -> "Iterator[tuple[str, _Kept]]":
        return zip(self._names, self._kept, strict=True)

    def move_biases(self) -> None:
        """Move selection biases by what the step has seen."""
        for router, kept in zip(self._routers, self._kept, strict=True):
            counts, kept.counts = kept.counts, torch.zeros_like(kept.counts)
            if router.e_score_correction_bias is not None:
                too_few = (counts < counts.mean()).double() - (counts > counts.mean()).double()
                router.e_score_correction_bias.data += router.spec.router_bias_update_speed * too_few


class _Kept(Balance):
    """Lets weights pass as they are, and keeps what they were chosen by."""

    def __init__(self, router: Router) -> None:
        super().__init__(router.spec)
        self._spec = router.spec
        self._documents: list[Choice] = []
        self.counts = torch.zeros(router.num_experts, dtype=torch.float64)
        self.routes: list[Tensor] = []
        """Of each sequence."""

    def attach(self, weights: Tensor, choice: Choice) -> Tensor:
        """Keep the choices of one document."""
        self._documents.append(choice)
        return weights

    def penalty(self) -> Tensor:
        """Return the penalty of the documents since the last call, one sequence together; see ``triax.nn.balance``."""
        spec, documents = self._spec, self._documents
        self._documents = []
        logits_SE = torch.cat([document.logits_BSE[0] for document in documents])
        chosen_SK = torch.cat([document.chosen_BSK[0] for document in documents])
        self.routes.append(chosen_SK.sort(dim=1).values.to(torch.int16))
        shares_SE = logits_SE.softmax(dim=1)
        if spec.scoring_func == "sigmoid":
            scores_SE = logits_SE.sigmoid()
            shares_SE = scores_SE / scores_SE.sum(dim=1, keepdim=True)
        counts_E = torch.bincount(chosen_SK.flatten(), minlength=spec.num_experts).to(torch.float64)
        self.counts += counts_E
        often_E = counts_E / counts_E.sum()
        balance = spec.num_experts * (often_E * shares_SE.mean(dim=0)).sum()
        z = logits_SE.logsumexp(dim=1).square().mean()
        return (spec.router_aux_loss_coef * balance + spec.router_z_loss_coef * z).to(torch.float64)
