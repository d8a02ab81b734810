"""What is a plan made for: which network, which step, on which machine, in which framework?"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from triax.errors import BadInput
from triax.plan.calibration import shipped, stack_of
from triax.plan.candidates import Candidates, Numbers
from triax.plan.engine import Engine
from triax.plan.hardware import Machine
from triax.plan.memory import IMBALANCE, Memory, is_walked, memory, walked_memory
from triax.plan.network import Network
from triax.plan.parts import parts
from triax.plan.step import FACTOR_NAMES, Factors, StepTime, combine
from triax.plan.workload import Workload

_FLOPS_OF_STEP: Final = 3.0
"""Operations of forward and backward over those of the forward."""
_LEAST_TIE: Final = 0.02
_MOST_TIE: Final = 0.03
"""More is not given away for a plainer layout."""
_MOST_TIE_UNMEASURED: Final = 0.10
"""The same on a card that nobody measured."""


@dataclass(frozen=True)
class Case:
    """The question; layouts are the answers."""

    network: Network
    workload: Workload
    machine: Machine
    engine: Engine

    @cached_property
    def _factors(self) -> Factors:
        return shipped().factors([stack_of(self.network, self.workload, self.machine.card, self.engine)])

    @cached_property
    def interval(self) -> float:
        """By which factor 80 % of measured steps are at most off the predicted ones, to either side."""
        stack = stack_of(self.network, self.workload, self.machine.card, self.engine)
        return float(shipped().interval([stack])[0])

    @property
    def tie(self) -> float:
        """Steps closer than this part of a step are equal: nobody could tell which is faster.

        Two runs of one layout differ by 2 % and more from one release to the next. Of a wider error about a quarter
        differs between layouts (*assumed*), and the rest is common to all; but nothing is known to be common on a card
        that nobody measured.
        """
        if f"card {self.machine.card.name}" in shipped().levels:
            return min(max(_LEAST_TIE, (self.interval - 1) / 4), _MOST_TIE)
        return min(max(_LEAST_TIE, self.interval - 1), _MOST_TIE_UNMEASURED)

    @cached_property
    def rests_on(self) -> str:
        """Which measurements the times of this case rest on."""
        return shipped().describe(stack_of(self.network, self.workload, self.machine.card, self.engine))

    def memory(self, candidates: Candidates, *, pipeline_rank: int | None = None) -> Memory:
        """Return the bytes of each candidate, on its fullest rank or on one that is asked for."""
        return memory(
            self.network, self.workload, self.machine.card, self.engine, candidates, pipeline_rank=pipeline_rank
        )

    def walked_memory(
        self, candidates: Candidates, *, pipeline_rank: int | None = None, imbalance: float = IMBALANCE
    ) -> Memory:
        """Return the same of a few candidates, walked moment by moment where triax trains them."""
        network, workload, engine = self.network, self.workload, self.engine
        found = memory(
            network, workload, self.machine.card, engine, candidates, pipeline_rank=pipeline_rank, imbalance=imbalance
        )
        if not is_walked(network, workload, engine):
            return found
        return walked_memory(
            found, network, workload, engine, candidates, pipeline_rank=pipeline_rank, imbalance=imbalance
        )

    def time(self, candidates: Candidates) -> StepTime:
        """Return the seconds of a step of each candidate, by what they go to."""
        made = parts(self.network, self.workload, self.machine, self.engine, candidates)
        return combine(made, self.factors(len(candidates)))

    def factors(self, count: int) -> Factors:
        """Return what this case's stack was measured to take, for ``count`` candidates."""
        return Factors(**{name: np.broadcast_to(getattr(self._factors, name), count) for name in FACTOR_NAMES})

    @property
    def flops_per_step(self) -> float:
        """Operations of the mathematics of a step; what is computed again is not counted."""
        forward = sum(self.network.forward_flops(self.workload.mean_attended).values())
        return _FLOPS_OF_STEP * forward * self.workload.tokens_per_step

    def utilisation(self, step_s: Numbers | float) -> Numbers:
        """Return the operations of a step over what all cards could have done in ``step_s`` in 16 bits (MFU)."""
        peak = self.machine.card.peak("bf16" if self.workload.precision.matmul != "fp32" else "fp32")
        result: Numbers = self.flops_per_step / (np.asarray(step_s) * self.machine.cards * peak)
        return result

    def on(self, servers: int) -> "Case":
        """Return the same case on another number of servers."""
        domain = self.machine.domain
        per_server = self.machine.cards_per_server
        kept = domain if domain <= per_server else min(domain, servers * per_server)
        name = f"{servers} x {per_server} {self.machine.card.name}"
        return replace(self, machine=replace(self.machine, servers=servers, domain=kept, name=name))

    def on_cards(self, cards: int) -> "Case":
        """Return the same case on ``cards`` cards: part of a server, or whole servers."""
        whole = self.machine.cards_per_server
        if cards >= whole:
            if cards % whole:
                raise BadInput(f"{cards} cards are no whole number of servers of {whole}.")
            return self.on(cards // whole)
        share = cards / whole
        part = replace(
            self.machine, servers=1, cards_per_server=cards, domain=min(self.machine.domain, cards),
            server_bytes_per_s=self.machine.server_bytes_per_s * share, name=f"1 x {cards} {self.machine.card.name}",
        )  # fmt: skip
        return replace(self, machine=part)
