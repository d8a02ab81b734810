"""Do ranks that must hold the same bits still hold them? Found by comparing a number that each makes of its own.

A bit that flips in memory, or a core that multiplies wrongly, raises no error (Dixit et al. 2021, arXiv:2102.11245).
Where several ranks hold the same weights and optimizer state, they update them from the same reduced gradients, and
must agree to the last bit: replicas of ``dp_replicate``, tp ranks of a weight that is not cut, ranks that hold the same
experts.

Each tensor's memory is summed as integers, which any single flipped bit changes; one small all-gather compares all.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from triax.nn.decoder import Decoder
from triax.parallel.expert import is_of_experts
from triax.parallel.tensor import is_whole
from triax.spec.layout import HELD, Held, Layout
from triax.spec.model import ModelSpec
from triax.train.optimizer import Optimizer

Digests = Sequence[Sequence[int]]
"""For each rank and each way of ``HELD`` a number made of all bits it holds so; zero where it holds none."""

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Odd:
    """Ranks that should hold the same and do not."""

    held: Held
    family: tuple[int, ...]
    ranks: tuple[int, ...]
    """Those that differ from a majority; empty where there is none, as between two."""


def odd_ones(layout: Layout, digests: Digests) -> list[Odd]:
    """Return every family of ranks that disagree: empty where all is well."""
    found = []
    for index, held in enumerate(HELD):
        for family in layout.families(held):
            values = {rank: digests[rank][index] for rank in family}
            ((usual, count), *others) = Counter(values.values()).most_common()
            if others:
                has_majority = 2 * count > len(family)
                ranks = tuple(rank for rank in family if values[rank] != usual) if has_majority else ()
                found.append(Odd(held, family, ranks))
    return found


def has_replicas(layout: Layout, model: ModelSpec) -> bool:
    """Return whether any two ranks hold weights of ``model`` alike."""
    ways: list[Held] = ["cut", "whole"]
    if model.experts is not None:
        ways += ["experts", "everywhere"] if model.experts.selection_bias else ["experts"]
    return any(len(family) > 1 for held in ways for family in layout.families(held)[:1])


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a rank held when ranks disagreed, to be compared with the same step of a replay."""

    step: int
    odd: tuple[Odd, ...]
    digests: Digests
    held: Mapping[str, Tensor]
    """Copies in host memory of the tensors in which this rank differs from one of its family."""


class Replicas:
    """The tensors of this rank, by the ranks that hold the same bits."""

    def __init__(self, stages: Sequence[Decoder], optimizer: Optimizer, layout: Layout) -> None:
        self._layout = layout
        remembered: dict[str, dict[str, Tensor]] = {}
        for key, value in optimizer.state_tensors().items():
            _, _, name = key.split(".", 2)  # optimizer.exp_avg.norm.weight
            remembered.setdefault(name, {})[key] = value
        self._tensors: dict[Held, dict[str, Tensor]] = {held: {} for held in HELD}
        for stage in stages:
            for name, parameter in stage.named_parameters():
                alike = self._tensors[_held(parameter)]
                alike.setdefault(name, parameter.detach())
                alike |= remembered.get(name, {})

    def digests(self) -> Digests:
        """Return the numbers of all ranks, which call this together; waits for the device."""
        mine = torch.stack([_mixed(list(self._tensors[held].values())) for held in HELD])
        gathered = [torch.empty_like(mine) for _ in range(self._layout.world_size)]
        dist.all_gather(gathered, mine)
        return [list(map(int, numbers)) for numbers in gathered]

    def evidence(self, step: int, digests: Digests) -> Evidence:
        """Return what is needed to say later who was wrong, while ranks disagree; all ranks call this together."""
        odd = tuple(odd_ones(self._layout, digests))
        names = [name for held in HELD for name in self._tensors[held]]
        sums = [_mixed([tensor]) for held in HELD for tensor in self._tensors[held].values()]
        room = torch.tensor(len(names))
        dist.all_reduce(room, dist.ReduceOp.MAX)
        mine = torch.zeros(int(room), dtype=torch.int64)
        if sums:
            mine[: len(sums)] = torch.stack(sums)
        gathered = [torch.empty_like(mine) for _ in range(self._layout.world_size)]
        dist.all_gather(gathered, mine)
        peers = {held: next(f for f in self._layout.families(held) if dist.get_rank() in f) for held in HELD}
        held_alike = [held for held in HELD for _ in self._tensors[held]]
        kept = {}
        for index, (name, held) in enumerate(zip(names, held_alike, strict=True)):
            if any(int(gathered[rank][index]) != int(mine[index]) for rank in peers[held]):
                kept[name] = _local(self._tensors[held][name]).cpu().clone()
        return Evidence(step, odd, digests, kept)

    def accused(self, evidence: Evidence) -> tuple[int, ...]:
        """Return who was wrong, now that a replay has come to the step of ``evidence``; all ranks call this together.

        A wrong replica spoils the others through its gradients, the same bits in each of them; on top of that it has
        what went wrong in itself. So of a family the rank that was farther from the replay was wrong. Empty where none
        was: then the replay went wrong in the same way.
        """
        now = {name: tensor for held in HELD for name, tensor in self._tensors[held].items()}
        far = torch.zeros((), dtype=torch.float64)
        for name, before in evidence.held.items():
            far += _distance(before, _local(now[name]).cpu())
        gathered = [torch.empty_like(far) for _ in range(self._layout.world_size)]
        dist.all_gather(gathered, far)
        found: set[int] = set()
        for odd in evidence.odd:
            distances = {rank: float(gathered[rank]) for rank in odd.family}
            farthest = max(distances.values())
            if min(distances.values()) < farthest:
                found |= {rank for rank in odd.family if distances[rank] == farthest}
        return tuple(sorted(found))


def _held(parameter: nn.Parameter) -> Held:
    if not isinstance(parameter, DTensor):  # a selection bias
        return "everywhere"
    if is_of_experts(parameter):
        return "experts"
    return "whole" if is_whole(parameter) else "cut"


def _mixed(tensors: Sequence[Tensor]) -> Tensor:
    """Return one integer of 64 bits, in host memory, made of all bits of ``tensors``; wraps around."""
    held = [local for tensor in tensors if (local := _local(tensor)).numel()]
    if not held:
        return torch.zeros((), dtype=torch.int64)
    sums = torch.stack([local.view(_INTEGERS[local.element_size()]).sum(dtype=torch.int64) for local in held])
    # Odd factors, a different one for each tensor: what one gained another cannot have lost.
    factors = torch.arange(1, 2 * len(held), 2, dtype=torch.int64, device=sums.device) * _GOLDEN
    return (sums * factors).sum().cpu()


_GOLDEN: Final = 0x1E3779B97F4A7C15
"""Odd, and without a pattern in its bits."""


def _local(tensor: Tensor) -> Tensor:
    local = tensor.detach()
    return (local.to_local() if isinstance(local, DTensor) else local).contiguous()


def _distance(before: Tensor, after: Tensor) -> Tensor:
    """Return the sum of all differences in fp64; what is not a number is as far as can be."""
    return (before.to(torch.float64) - after.to(torch.float64)).abs().nan_to_num(nan=1e300, posinf=1e300).sum()
