"""By how much do real stacks miss the parts of a step, and how sure is a prediction?

Factors are kept as logarithms, in levels from all stacks together to one framework's releases on one card: what holds
for many is said once, and a level with few rows says little (it was fitted with a prior that shrinks it). The factors
of a stack are the sum over the levels that it belongs to; a stack nobody measured has those of the levels it shares.
``benchmarks/fit_planner.py`` makes the file.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal

import numpy as np

from triax.plan.candidates import Numbers
from triax.plan.engine import Engine
from triax.plan.hardware import Card
from triax.plan.network import Network
from triax.plan.step import FACTOR_NAMES, Factors
from triax.plan.workload import Workload

FORMAT_VERSION: Final = 1
Width = Literal["16", "8", "4"]


@dataclass(frozen=True, slots=True)
class Stack:
    """What a measurement is a measurement of, the layout apart."""

    card: str
    family: str
    engine: str
    width: Width
    """Bits of the matrix products."""
    kind: Literal["dense", "moe", "hybrid"] = "dense"
    is_lora: bool = False
    framework: str = ""
    """As its users name it; empty where the engine is all that is known."""
    release: str = ""

    def levels(self) -> tuple[str, ...]:
        """Return the levels that this stack belongs to, the widest first."""
        card = self.card
        levels = [
            "all", f"family {self.family}", f"engine {self.engine}", f"card {card}", f"width {self.width}",
            f"kind {self.kind}", f"family {self.family} card {card}", f"engine {self.engine} card {card}",
            f"card {card} width {self.width}", f"engine {self.engine} width {self.width}",
            f"engine {self.engine} kind {self.kind}", f"card {card} kind {self.kind}",
            f"engine {self.engine} card {card} width {self.width} kind {self.kind}",
        ]  # fmt: skip
        if self.is_lora:
            levels.append(f"lora {self.family}")
        if self.framework:
            stack = f"stack {self.framework} card {card} width {self.width} kind {self.kind}"
            levels += [f"stack {self.framework}", stack]
            if self.release:
                levels.append(f"{stack} release {self.release}")
        return tuple(levels)


def stack_of(
    network: Network, workload: Workload, card: Card, engine: Engine, framework: str = "", release: str = ""
) -> Stack:
    """Return the stack that a prediction is about."""
    widths: dict[str, Width] = {"fp8": "8", "fp4": "4"}
    return Stack(
        card=card.name,
        family=engine.family,
        engine=engine.name,
        width=widths.get(workload.precision.matmul, "16"),
        kind="hybrid" if network.state_space is not None else "dense" if network.experts is None else "moe",
        is_lora=workload.lora_rank > 0,
        framework=framework,
        release=release,
    )


@dataclass(frozen=True)
class Calibration:
    """Fitted levels, and how far off predictions were that were made without the row they were for."""

    levels: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Logarithms by level, then by factor."""
    spread: Mapping[str, float] = field(default_factory=dict)
    """80th percentile of |log(measured / predicted)| by level, held-out."""
    about: str = ""

    def factors(self, stacks: Sequence[Stack]) -> Factors:
        """Return the factors of each stack."""
        return Factors(**{name: np.exp([self._log(stack, name) for stack in stacks]) for name in FACTOR_NAMES})

    def _log(self, stack: Stack, name: str) -> float:
        return sum(self.levels.get(level, {}).get(name, 0.0) for level in stack.levels())

    def interval(self, stacks: Sequence[Stack]) -> Numbers:
        """Return by which factor 80 % of measurements are at most off, of each stack: always above one."""
        return np.exp([self._spread(stack) for stack in stacks])

    def _spread(self, stack: Stack) -> float:
        """That of the narrowest level measured often enough; of families never measured, that of families left out.

        Frameworks with a handful of runs are further off than the levels that they share with others say.
        """
        if f"family {stack.family}" not in self.levels:
            return self.spread.get("unknown", 0.25)
        if stack.framework and f"stack {stack.framework}" not in self.spread and "few" in self.spread:
            return self.spread["few"]
        for level in reversed(stack.levels()):
            if level in self.spread:
                return self.spread[level]
        return self.spread.get("unknown", 0.25)

    def describe(self, stack: Stack) -> str:
        """Return which measurements a prediction rests on: the narrowest level known."""
        known = [level for level in stack.levels() if level in self.levels]
        return known[-1] if known else "nothing measured"


def from_value(value: Mapping[str, Any]) -> Calibration:
    """Return the calibration that a file's object holds; raise ValueError where it is of another version."""
    if value.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"calibration of format {value.get('format_version')}, this is format {FORMAT_VERSION}")
    return Calibration(value["levels"], value["spread"], value.get("about", ""))


@cache
def shipped() -> Calibration:
    """Return the calibration that comes with triax."""
    return from_value(json.loads((files("triax.plan") / "calibration.json").read_text(encoding="utf-8")))
