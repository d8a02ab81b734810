"""Do all experts of a layer have work? What is written of it in each step, and when somebody is told.

Torch-free. A load is a number of tokens beside the mean of its layer: 1.0 is what each expert should have.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MAX_LOAD: Final = "experts/max_load"
"""The largest load of any expert of any layer; that of each layer stands under ``experts/max_load/layer_3``."""
IDLE: Final = "experts/idle"
"""Experts of all layers that no token chose."""
BALANCE_LOSS: Final = "experts/balance_loss"
"""Mean over the layers of the balance loss before its coefficient: 1.0 is balanced (``triax.nn.balance``)."""
Z_LOSS: Final = "experts/z_loss"
"""Mean over the layers of the z-loss before its coefficient."""

_SETTLING_STEPS: Final = 100
"""Steps at the start of a run in which routers are allowed to be one-sided (*assumed*)."""

_STEPS_SEEN: Final = 20
"""Steps whose tokens are added up before a load is called heavy: in a single one chance counts for much (*assumed*)."""


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """What the experts of one layer had to do in a step, over all ranks."""

    layer: int
    tokens: tuple[float, ...]
    """How many tokens chose each expert."""
    balance_loss: float
    z_loss: float | None
    """None where scores are sigmoids."""


def expert_metrics(loads: Sequence[LayerLoad]) -> dict[str, int | float]:
    """Return the metrics of a step under their keys; none where no layer has experts."""
    if not loads:
        return {}
    by_layer = {load.layer: _heaviest(load.tokens)[1] for load in loads}
    found: dict[str, int | float] = {
        MAX_LOAD: max(by_layer.values()),
        IDLE: sum(count == 0 for load in loads for count in load.tokens),
        BALANCE_LOSS: sum(load.balance_loss for load in loads) / len(loads),
    }
    z_losses = [load.z_loss for load in loads if load.z_loss is not None]
    if z_losses:
        found[Z_LOSS] = sum(z_losses) / len(z_losses)
    return found | {f"{MAX_LOAD}/layer_{layer}": load for layer, load in by_layer.items()}


def _heaviest(tokens: Sequence[float]) -> tuple[int, float]:
    """Return which expert has the most tokens, and its load."""
    mean = sum(tokens) / len(tokens)
    expert = max(range(len(tokens)), key=tokens.__getitem__)
    return expert, tokens[expert] / mean if mean else 0.0


class LoadCheck:
    """Says once that an expert has far more than its part: its rank keeps all others waiting.

    Far more is half of the most there can be, which is every token choosing it: E / K times the mean. The first hundred
    steps of a run are left out.
    """

    def __init__(self, num_experts: int, num_experts_per_tok: int) -> None:
        self._heavy = num_experts / num_experts_per_tok / 2
        self._seen: deque[Sequence[LayerLoad]] = deque(maxlen=_STEPS_SEEN)
        self._has_warned = False

    def warning(self, step: int, loads: Sequence[LayerLoad]) -> str | None:
        """Return one sentence the first time that the last steps together were heavy, else None."""
        if step <= _SETTLING_STEPS:
            return None
        self._seen.append(loads)
        if self._has_warned or self._heavy <= 1 or len(self._seen) < _STEPS_SEEN:
            return None
        for of_layer in zip(*self._seen, strict=True):
            tokens = [sum(counts) for counts in zip(*(load.tokens for load in of_layer), strict=True)]
            expert, load = _heaviest(tokens)
            if load >= self._heavy:
                self._has_warned = True
                return (
                    f"expert {expert} of layer {of_layer[0].layer} had {load:.1f} times the tokens of the mean expert "
                    f"over steps {step - _STEPS_SEEN + 1} to {step}, and the ranks of the others wait for it: raise "
                    f"model.experts.router_aux_loss_coef, or use selection_bias with router_bias_update_speed; "
                    f"{MAX_LOAD} in metrics.jsonl shows every step."
                )
        return None
