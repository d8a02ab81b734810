"""Is one number or tensor what it must be: equal, equal but for rounding, or different?"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, Self

from triax.spec.model import ModelSpec
from triax.spec.weights import weights_table

Kind = Literal["initial", "routes", "output", "loss", "gradient", "norm", "weight"]
Verdict = Literal["equal", "rounding", "different"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What the comparison of one thing came to."""

    kind: Kind
    name: str
    """Of the weight or the module; empty for a loss and a norm."""
    step: int
    """Update, from 1, in or after which it was compared; 0: before the first."""
    difference: float
    """Relative to the largest number of the tensor; infinite where one side has nothing to compare."""
    allowed: float
    are_bits_equal: bool
    factor: float | None = None
    """Where it is a multiple of what it must be."""
    note: str = ""
    ranks: tuple[int, ...] = ()
    """Ranks on which it is different."""
    flips: int = 0
    """Of ``choices``, those that fell otherwise; on all ranks together, once findings are merged."""
    choices: int = 0
    """Choices of experts that were compared."""

    @property
    def verdict(self) -> Verdict:
        if self.are_bits_equal:
            return "equal"
        return "rounding" if self.difference <= self.allowed else "different"

    def what(self) -> str:
        """Return what was compared, in words."""
        match self.kind:
            case "loss" | "norm":
                return f"the {'loss' if self.kind == 'loss' else 'gradient norm'} of step {self.step}"
            case "routes":
                return f"the choice of experts of {self.name} in step {self.step}"
            case "output":
                return f"what {self.name} gives in the forward"
            case "gradient":
                return f"the gradient of {self.name}"
            case "initial":
                return f"the initial {self.name}"
            case _:
                return f"{self.name} after step {self.step}"

    def why(self) -> str:
        """Return by how much it differs, in words."""
        if self.note:
            return self.note
        if self.kind == "routes":
            return f"{self.flips} of {self.choices} choices fell otherwise"
        if self.factor is not None:
            return f"it is {self.factor:.6g} times what it must be"
        return f"relative {self.difference:.1e}, and {self.allowed:.0e} is allowed"

    def as_json(self) -> dict[str, Any]:
        """Return plain values; JSON has no infinity."""
        said = asdict(self)
        return said | {
            "difference": self.difference if math.isfinite(self.difference) else None,
            "verdict": self.verdict,
            "ranks": list(self.ranks),
        }

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Self:
        """Return what ``as_json`` was made of."""
        known = {key: value for key, value in said.items() if key != "verdict"}
        difference = math.inf if said["difference"] is None else said["difference"]
        return cls(**(known | {"difference": difference, "ranks": tuple(said["ranks"])}))


def merged(by_rank: Sequence[Iterable[Finding]], expected: Iterable[Finding], model: ModelSpec) -> list[Finding]:
    """Return one finding for each thing, the worst of all ranks, in the order in which training comes to them.

    ``expected`` are things that some rank must have compared: one that none has becomes a difference.
    """
    worst: dict[tuple[str, str, int], Finding] = {(f.kind, f.name, f.step): f for f in expected}
    seen: set[tuple[str, str, int]] = set()
    ranks: dict[tuple[str, str, int], list[int]] = {}
    counts: dict[tuple[str, str, int], list[Finding]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            key = (finding.kind, finding.name, finding.step)
            if finding.kind == "routes":
                counts.setdefault(key, []).append(finding)
            if finding.verdict == "different":
                ranks.setdefault(key, []).append(rank)
            if key not in seen or _badness(finding) > _badness(worst[key]):
                worst[key] = finding
            seen.add(key)
    found = [
        replace(
            finding, ranks=tuple(ranks.get(key, ())), flips=sum(one.flips for one in counts.get(key, ())),
            choices=sum(one.choices for one in counts.get(key, ())),
        )
        for key, finding in worst.items()
    ]  # fmt: skip
    return sorted(found, key=_Order(model))


def _badness(finding: Finding) -> tuple[bool, bool, float]:
    return finding.verdict == "different", not finding.are_bits_equal, finding.difference


_FIRST_STEP: Final = {"initial": 0, "routes": 1, "output": 1, "loss": 2, "gradient": 3, "norm": 4, "weight": 5}


class _Order:
    """When training comes to a thing: through the network, back through it, through the update, and to later steps."""

    def __init__(self, model: ModelSpec) -> None:
        self._places = {weight.name: place for place, weight in enumerate(weights_table(model))}
        self._layers = model.num_hidden_layers

    def __call__(self, finding: Finding) -> tuple[int, int, float]:
        place: float = 0
        if finding.kind in ("routes", "output"):
            place = self._module_place(finding.name) - (0.1 if finding.kind == "routes" else 0.0)
        elif finding.name:
            place = self._places[finding.name]
        return finding.step, _FIRST_STEP[finding.kind], -place if finding.kind == "gradient" else place

    def _module_place(self, name: str) -> float:
        parts = name.split(".")
        if parts[0] != "layers":
            return -1 if name == "embed_tokens" else self._layers
        inside = {"self_attn": 0.25, "mlp": 0.5}
        return int(parts[1]) + (inside[parts[2]] if len(parts) > 2 else 0.75)
