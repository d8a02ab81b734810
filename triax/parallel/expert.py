"""How are experts spread over ranks, and how do tokens reach them?

Expert parallelism (Lepikhin et al. 2020, GShard, arXiv:2006.16668): each of ``ep`` ranks holds its part of the experts
of every layer, and tokens travel. The axis is borrowed: the ranks of one pipeline rank and replica, dp_shard x cp x tp
of them, are also expert_shard x ep, neighbours first. Every one of them brings tokens of its own, since tensor
parallelism leaves each rank a part of the sequence between its collectives.

    rows ordered by expert -> counts: all-to-all of E numbers -> rows: all-to-all -> own experts -> all-to-all back

All ranks call the same collectives whatever the routing, with zero rows where there are none; how many rows go where
changes nothing but sizes. Ranks that hold the same experts share them as ``zero`` says, over ``expert_shard``.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from triax.nn.balance import Balance
from triax.nn.decoder import Decoder
from triax.nn.moe import Exchange, Experts, MixtureOfExperts, permuted
from triax.parallel.mesh import EXPERT_AXES
from triax.parallel.tensor import local
from triax.spec.experts import ExpertSpec
from triax.spec.layout import Layout
from triax.spec.model import ModelSpec


def split_experts(stage: Decoder, experts: DeviceMesh | None, sequence: dist.ProcessGroup, layout: Layout) -> None:
    """Give each ``ep`` rank its part of the experts of ``stage``, and the layers what they need to work together.

    ``experts`` is the mesh of ``expert_mesh``, ``sequence`` the group of those that have parts of the same sequences.
    Expects a stage on ``meta``.
    """
    for _, mixture in mixtures(stage):
        if sequence.size() > 1:
            mixture.gate.balance = SplitBalance(mixture.gate.spec, sequence)
        mixture.gate.balance.sequence_weight = layout.gradient_ranks / layout.sequences_per_step
        if layout.ep > 1 and experts is not None:
            for name, weight in list(mixture.experts.named_parameters(recurse=False)):
                cut = distribute_tensor(weight.detach(), experts["ep"], [Shard(0)], src_data_rank=None)
                mixture.experts.register_parameter(name, nn.Parameter(cut))
            mixture.experts.__class__ = LocalExperts
            mixture.exchange = ExpertExchange(experts["ep"].get_group())


def mixtures(stage: Decoder) -> Iterator[tuple[int, MixtureOfExperts]]:
    """Yield every mixture of experts of ``stage`` with the index of its layer."""
    for index, layer in stage.layers.items():
        mixture = layer.get_submodule("mlp")
        if isinstance(mixture, MixtureOfExperts):
            yield int(index), mixture


def selection_biases(stage: Decoder) -> set[nn.Parameter]:
    """Return the biases that no gradient moves; every rank holds them whole, in the master precision."""
    biases = (mixture.gate.e_score_correction_bias for _, mixture in mixtures(stage))
    return {bias for bias in biases if bias is not None}


class LocalExperts(Experts):
    """Those experts that are here."""

    def matrices(self, weight: Tensor) -> Tensor:
        """Return the matrices of this rank's experts as a plain tensor."""
        return local(weight)


class SplitBalance(Balance):
    """A balance over sequences of which each rank has a part."""

    def __init__(self, experts: ExpertSpec, group: dist.ProcessGroup) -> None:
        super().__init__(experts)
        self._group = group
        self.parts = group.size()

    def over_parts(self, counts_BE: Tensor) -> Tensor:
        """Return the sum over the ranks of the group, without gradient: it counts."""
        dist.all_reduce(counts_BE, group=self._group)
        return counts_BE


@dataclass(frozen=True, slots=True)
class _WayBack:
    """How rows that came from other ranks return to them."""

    sent: list[int]
    """Rows that went to each rank."""
    received: list[int]
    """Rows that came from each rank."""
    by_expert_C: Tensor
    """The order in which this rank's experts took the rows that came."""
    as_received_C: Tensor
    """The inverse."""


class ExpertExchange(Exchange):
    """Rows go to the ranks of their experts: rank ``r`` of the group has the ``r``-th of equal parts of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def send(self, rows_CD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Any]:
        """See ``Exchange.send``; rows of one expert come ordered by the rank they are from."""
        ranks = self._group.size()
        counts_RE = torch.empty_like(counts_E)
        dist.all_to_all_single(counts_RE, counts_E, group=self._group)
        counts_RE = counts_RE.view(ranks, -1)
        sizes = torch.stack((counts_E.view(ranks, -1).sum(dim=1), counts_RE.sum(dim=1)))
        sent, received = sizes.tolist()  # the host must know how much memory what comes needs
        here = _exchanged(rows_CD, sent, received, self._group)
        by_expert_C, as_received_C = _orders(counts_RE)
        here = permuted(here, by_expert_C, as_received_C)
        return here, counts_RE.sum(dim=0), _WayBack(sent, received, by_expert_C, as_received_C)

    def receive(self, rows_CD: Tensor, way_back: Any) -> Tensor:
        """See ``Exchange.receive``."""
        assert isinstance(way_back, _WayBack)
        rows_CD = permuted(rows_CD, way_back.as_received_C, way_back.by_expert_C)
        return _exchanged(rows_CD, way_back.received, way_back.sent, self._group)


def _orders(counts_RE: Tensor) -> tuple[Tensor, Tensor]:
    """Return in which order rows that lie by rank, and for each rank by expert, lie by expert; and the inverse.

    ``counts[r, e]`` rows of expert ``e`` came from rank ``r``.
    """
    ranks, experts = counts_RE.shape
    expert_of_block = torch.arange(experts, device=counts_RE.device).repeat(ranks)
    expert_C = expert_of_block.repeat_interleave(counts_RE.flatten())
    by_expert_C = expert_C.argsort(stable=True)
    places = torch.arange(len(by_expert_C), device=counts_RE.device)
    return by_expert_C, torch.empty_like(by_expert_C).scatter_(0, by_expert_C, places)


def _exchanged(rows_CD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    moved: Tensor = _Exchange.apply(rows_CD, sent, received, group)  # type: ignore[no-untyped-call]
    return moved


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; its backward sends gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows_CD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _all_to_all(rows_CD, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _all_to_all(grad_outputs[0], received, sent, ctx.group), None, None, None


def _all_to_all(rows_CD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    here = rows_CD.new_empty(sum(received), rows_CD.shape[1])
    dist.all_to_all_single(here, rows_CD.contiguous(), received, sent, group=group)
    return here


def is_of_experts(parameter: nn.Parameter) -> bool:
    """Return whether ``parameter`` is shared over the mesh of experts."""
    return isinstance(parameter, DTensor) and EXPERT_AXES[1] in (parameter.device_mesh.mesh_dim_names or ())


def sum_experts(parameters: Iterable[nn.Parameter], layout: Layout) -> None:
    """Bring the gradients of experts to the scale of all others.

    ``fully_shard`` has averaged each over the ranks that hold it, and each of these had the tokens of ``ep`` ranks;
    what is meant is the sum over all ranks divided by those that gradients of other weights are averaged over.
    """
    scale = layout.tp / layout.ep
    if scale == 1.0:
        return
    for parameter in parameters:
        if is_of_experts(parameter) and isinstance(parameter.grad, DTensor):
            parameter.grad._local_tensor.mul_(scale)


class ExpertLoad:
    """What the layers of all stages saw in a step, and the biases that follow from it."""

    def __init__(self, stages: Sequence[Decoder], model: ModelSpec, device: torch.device) -> None:
        self.layers = tuple(model.sparse_layers)
        """Layers with experts, ascending."""
        self._here = {index: mixture.gate for stage in stages for index, mixture in mixtures(stage)}
        self._experts, self._device = model.experts, device
        self._width = 0 if model.experts is None else model.experts.num_experts + 2

    def take(self) -> Tensor:
        """Return what this rank saw since the last call, (layers x (E + 2)) flat in fp64: see ``Balance.take``. The sum
        over all ranks is what the step saw."""
        seen = torch.zeros(len(self.layers), self._width, dtype=torch.float64, device=self._device)
        for row, layer in enumerate(self.layers):
            if layer in self._here:
                seen[row] = self._here[layer].balance.take(self._device)
        return seen.flatten()

    def move_biases(self, seen: Tensor, is_finite: Tensor) -> None:
        """Move the selection biases of this rank's layers by what all ranks saw, unless ``is_finite`` is false.

        By ``router_bias_update_speed``, up where an expert had fewer tokens than the mean (arXiv:2408.15664, algorithm
        1). All ranks have the same bits of ``seen``, so they stay equal.
        """
        if self._experts is None or not self._experts.router_bias_update_speed:
            return
        speed = self._experts.router_bias_update_speed
        for row, layer in zip(seen.view(len(self.layers), -1), self.layers, strict=True):
            bias = self._here[layer].e_score_correction_bias if layer in self._here else None
            if bias is not None:
                counts_E = row[:-2]
                moved = (counts_E.mean() - counts_E).sign() * speed * is_finite
                bias.data.add_(moved.to(bias.dtype))
