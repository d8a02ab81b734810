"""How do gradients change weights: fused AdamW (or SGD) on this rank's shards, unless they must not."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.sgd import sgd

from triax.nn.decoder import Decoder
from triax.spec.model import ModelSpec
from triax.spec.run import OptimizerSpec
from triax.spec.weights import weights_table

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """The update rule with all of its state in memory from the start, so that step 1 needs as much as step 1000."""

    def __init__(self, stages: Sequence[Decoder], model: ModelSpec, spec: OptimizerSpec, device: torch.device) -> None:
        decays = {weight.name: weight.decays for weight in weights_table(model)}
        self._named: dict[str, nn.Parameter] = {}
        self._copies: dict[str, nn.Parameter] = {}
        """A tied embedding's second copy, where one rank owns the first and the last stage."""
        for stage in stages:
            for name, parameter in stage.named_parameters():
                if not parameter.requires_grad:
                    continue
                (self._copies if name in self._named else self._named)[name] = parameter
        self._all = [*self._named.items(), *self._copies.items()]
        groups = [
            {"params": [p for name, p in self._all if decays[name] == wanted], "weight_decay": decay}
            for wanted, decay in ((True, spec.weight_decay), (False, 0.0))
        ]
        groups = [group for group in groups if group["params"]]
        self._torch = _torch_optimizer(groups, spec)
        self.before_update: Callable[[], None] = _nobody_reads
        """Called before weights and state change: who still reads them has it wait."""
        if spec.name == "adamw":
            for _, parameter in self._all:
                moments = {moment: torch.zeros_like(parameter.detach()) for moment in _MOMENTS}
                self._torch.state[parameter] = {"step": torch.zeros((), device=device)} | moments

    @property
    def parameters(self) -> Iterable[nn.Parameter]:
        """Every weight that is trained, this rank's shards."""
        return [parameter for _, parameter in self._all]

    def copy_tied(self) -> None:
        """Give a second copy the bits of the first, after the first was loaded."""
        for name, copy in self._copies.items():
            original = self._named[name]
            copy.detach().copy_(original.detach())
            for key, value in self._torch.state[original].items():
                self._torch.state[copy][key].copy_(value)

    def reset(self) -> None:
        """Forget all that was remembered, as before the first update."""
        for state in self._torch.state.values():
            for value in state.values():
                value.zero_()

    def update(self, rate: float, stands: Tensor) -> None:
        """Apply the gradients at learning rate ``rate``, unless ``stands`` (a bool on the device) is false.

        Then weights, moments and step counters keep their bits, and the host never had to ask. Gradients are dropped.
        """
        for group in self._torch.param_groups:
            group["lr"] = rate
        self.before_update()
        self._torch.found_inf = (~stands).to(torch.float32)  # type: ignore[attr-defined]
        self._torch.step()
        self._torch.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live state under the names it has in checkpoints: ``optimizer.exp_avg.layers.0. ...``."""
        return {
            f"optimizer.{key}.{name}": value
            for name, parameter in self._named.items()
            for key, value in self._torch.state[parameter].items()
        }


def _nobody_reads() -> None:
    """Let the update go ahead."""


def _torch_optimizer(groups: list[dict[str, object]], spec: OptimizerSpec) -> torch.optim.Optimizer:
    if spec.name == "sgd":
        return _ShardedSGD(groups, lr=0.0, fused=True)
    return torch.optim.AdamW(groups, lr=0.0, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True)


class _ShardedSGD(torch.optim.SGD):
    """torch's fused SGD on the shards themselves: unlike AdamW's, its kernel has no rule for DTensors."""

    found_inf: Tensor

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            sgd(
                [_local(parameter) for parameter in moved],
                [_local(parameter.grad) for parameter in moved],
                [None] * len(moved),
                weight_decay=group["weight_decay"], momentum=0.0, lr=group["lr"], dampening=0.0, nesterov=False,
                maximize=False, fused=True, found_inf=self.found_inf,
            )  # fmt: skip


def _local(tensor: Any) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
