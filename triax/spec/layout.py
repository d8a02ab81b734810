"""How does a run lie on a cluster: how many parts along each axis, and which rank is which part?

A Layout never changes the mathematics of a run, only its speed, memory and money. It knows every rank's place by
integer arithmetic alone, so that a planner without a cluster and a trainer with one mean the same thing.
"""

from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from triax.spec.value import Counts, SmallCount, Value, as_tuple

Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]
AXES: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
Recompute = Literal["none", "selective", "full"]
ContextMethod = Literal["all_gather", "ring", "all_to_all"]
ScheduleName = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


def _names_each_axis(order: tuple[Axis, ...]) -> tuple[Axis, ...]:
    if sorted(order) != sorted(AXES):
        raise ValueError(f"{list(order)} must name each of {', '.join(AXES)} exactly once.")
    return order


AxisOrder = Annotated[tuple[Axis, ...], BeforeValidator(as_tuple), AfterValidator(_names_each_axis)]
"""Every axis once, outermost first."""


class Coordinate(NamedTuple):
    """The place of one rank: its index along each axis."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    def __str__(self) -> str:
        return " ".join(f"{axis}={index}" for axis, index in zip(AXES, self, strict=True))


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a layout is illegal: the constraint that binds and the nearest legal value, in one sentence."""

    key: str
    message: str


class Layout(Value):
    """Degrees of each axis, what is sharded, how a step is cut into microbatches, and which axis is outermost."""

    pp: SmallCount = 1
    """Pipeline stages' owners: each holds some of the layers."""
    dp_replicate: SmallCount = 1
    """Full copies that see different sequences and all-reduce gradients."""
    dp_shard: SmallCount = 1
    """Ranks that see different sequences and share one copy of what ``zero`` says."""
    cp: SmallCount = 1
    """Parts that one sequence is cut into; their ranks share what ``zero`` says, as those of dp_shard do."""
    tp: SmallCount = 1
    """Parts that each matrix is cut into."""
    ep: SmallCount = 1
    """Groups that experts are spread over, borrowed from dp_shard x cp x tp."""
    zero: int = Field(default=1, ge=0, le=3)
    """What dp_shard and cp share: 0 nothing, 1 optimizer state, 2 and gradients, 3 and weights."""
    schedule: ScheduleName = "1F1B"
    stages_per_rank: SmallCount = 1
    stage_cuts: Counts | None = None
    """Layers in each stage, first stage first; absent means cut by cost."""
    sequences_per_microbatch: SmallCount = 1
    """Sequences of one forward on one data rank."""
    microbatches: SmallCount = 1
    """Forwards of one step on one data rank."""
    cp_method: ContextMethod = "all_gather"
    """How parts of a sequence meet in attention: keys and values gathered, passed around a ring, or heads exchanged for
    positions (all_to_all)."""
    recompute: Recompute = "none"
    """Activations computed again in the backward: none, selective (all but matmul outputs and attention), full."""
    order: AxisOrder = AXES
    """Outermost axis first. Neighbouring ranks differ in the last axis, so it is the one kept inside a server."""

    @property
    def world_size(self) -> int:
        """Ranks that the layout needs."""
        return prod(self.degree(axis) for axis in AXES)

    @property
    def data_ranks(self) -> int:
        """Ranks that see different sequences: dp_replicate x dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def gradient_ranks(self) -> int:
        """Ranks over which the gradient of a weight is averaged: all that see other tokens, dp_replicate x dp_shard x
        cp."""
        return self.data_ranks * self.cp

    @property
    def weight_shards(self) -> int:
        """Ranks that share one copy of what ``zero`` says: dp_shard x cp, as parts of a sequence share its weights."""
        return 1 if self.zero == 0 else self.dp_shard * self.cp

    @property
    def weight_replicas(self) -> int:
        """Copies of each weight that all-reduce its gradient."""
        return self.gradient_ranks // self.weight_shards

    def weight_place(self, rank: int) -> tuple[int, int]:
        """Return which replica and which shard of its weights ``rank`` holds: both grow with the number of the rank."""
        shared: tuple[Axis, ...] = () if self.zero == 0 else ("dp_shard", "cp")
        copied: tuple[Axis, ...] = tuple(axis for axis in ("dp_replicate", "dp_shard", "cp") if axis not in shared)
        return self._index_along(rank, copied), self._index_along(rank, shared)

    def _index_along(self, rank: int, axes: tuple[Axis, ...]) -> int:
        """Return the place of ``rank`` among the ranks that differ from it along ``axes`` alone, in ascending order."""
        here, place = self.coordinate(rank), 0
        for axis in self.order:
            if axis in axes:
                place = place * self.degree(axis) + getattr(here, axis)
        return place

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one update over all ranks."""
        return self.data_ranks * self.sequences_per_microbatch * self.microbatches

    def degree(self, axis: Axis) -> int:
        """Return the number of parts along ``axis``."""
        return int(getattr(self, axis))

    @property
    def expert_ranks(self) -> int:
        """Ranks that experts may be spread over: all of one pipeline rank and replica."""
        return self.dp_shard * self.cp * self.tp

    @property
    def expert_shards(self) -> int:
        """Ranks that share one copy of the same experts, as ``zero`` says."""
        return 1 if self.zero == 0 else self.expert_ranks // self.ep

    @property
    def expert_replicas(self) -> int:
        """Copies of each expert that all-reduce its gradient."""
        return self.dp_replicate * self.expert_ranks // self.ep // self.expert_shards

    def expert_place(self, rank: int) -> tuple[int, int, int]:
        """Return which replica of which shard of which part of the experts ``rank`` holds: (replica, shard, ep index).

        The ``ep`` ranks of a family are neighbours: those that ``order`` puts next to each other.
        """
        here, place = self.coordinate(rank), 0
        for axis in self.order:
            if axis in ("dp_shard", "cp", "tp"):
                place = place * self.degree(axis) + getattr(here, axis)
        copy, ep_index = divmod(place, self.ep)
        replica, shard = divmod(copy, self.expert_shards)
        return here.dp_replicate * (self.expert_replicas // self.dp_replicate) + replica, shard, ep_index

    def coordinate(self, rank: int) -> Coordinate:
        """Return where ``rank`` sits; ranks count fastest along the last axis of ``order``."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a layout of {self.world_size} ranks")
        index: dict[str, int] = {}
        for axis in reversed(self.order):
            rank, index[axis] = divmod(rank, self.degree(axis))
        return Coordinate(**index)

    def rank(self, coordinate: Coordinate) -> int:
        """Return which rank sits at ``coordinate``: the inverse of ``coordinate``."""
        rank = 0
        for axis in self.order:
            rank = rank * self.degree(axis) + getattr(coordinate, axis)
        return rank

    def peers(self, rank: int, axis: Axis) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` along ``axis`` alone, ``rank`` included, in axis order."""
        here = self.coordinate(rank)
        return tuple(self.rank(here._replace(**{axis: index})) for index in range(self.degree(axis)))

    def data_rank(self, rank: int) -> int:
        """Return which part of each microbatch ``rank`` sees: 0 <= data_rank < data_ranks, whatever the order."""
        here = self.coordinate(rank)
        return here.dp_replicate * self.dp_shard + here.dp_shard

    def describe_rank(self, rank: int) -> str:
        """Return a rank and where it sits along the axes that are cut: ``"rank 3 (pp=1 tp=1)"``."""
        here = self.coordinate(rank)
        place = " ".join(f"{axis}={getattr(here, axis)}" for axis in AXES if self.degree(axis) > 1)
        return f"rank {rank} ({place})" if place else f"rank {rank}"

    def describe(self) -> str:
        """Return the layout as a user would type it, degrees of one left out: ``"dp_shard=4 zero=3"``."""
        degrees = [f"{axis}={self.degree(axis)}" for axis in AXES if self.degree(axis) > 1] or ["one rank"]
        if self.ep > 1:
            degrees.append(f"ep={self.ep}")
        if self.cp > 1 and self.cp_method != "all_gather":
            degrees.append(f"cp_method={self.cp_method}")
        if self.dp_shard * self.cp > 1 or self.expert_ranks > self.ep > 1:
            degrees.append(f"zero={self.zero}")
        if self.pp > 1:
            degrees.append(f"schedule={self.schedule}")
        if self.stages_per_rank > 1:
            degrees.append(f"stages_per_rank={self.stages_per_rank}")
        if self.recompute != "none":
            degrees.append(f"recompute={self.recompute}")
        return " ".join(degrees)
