"""How does a network become the part of it that this rank holds? One function that reads like a recipe."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from triax.nn.decoder import Decoder
from triax.nn.init import initial_rows
from triax.parallel.context import split_context
from triax.parallel.execute import Executor, LocalExecutor
from triax.parallel.expert import split_experts
from triax.parallel.mesh import expert_mesh, sequence_group, weight_mesh
from triax.parallel.pipeline import PipelineExecutor
from triax.parallel.progress import Progress
from triax.parallel.recompute import wrap_recompute
from triax.parallel.shard import DTYPES, shard
from triax.parallel.tensor import split_tensors
from triax.spec.layout import Layout
from triax.spec.model import ModelSpec
from triax.spec.run import PrecisionSpec
from triax.spec.schedule import ScheduleTable, stage_owner
from triax.spec.stages import stage_layers
from triax.spec.weights import Weight, weights_table


def place(
    model: ModelSpec, layout: Layout, precision: PrecisionSpec, mesh: DeviceMesh, device: torch.device
) -> Sequence[Decoder]:
    """Return this rank's stages of ``model``, laid out as ``layout`` says, with memory but without values.

    Each step does nothing at degree one inside itself. Weights are DTensors in the master precision under the names of
    the weights table. Fill them with ``initialise`` or from a checkpoint.
    """
    stages = cut_into_stages(model, layout, precision)
    weights = weight_mesh(mesh, layout)
    experts = expert_mesh(layout, model, device.type)
    sequence = sequence_group(mesh)
    for stage in stages:
        split_tensors(stage, weights)
        split_experts(stage, experts, sequence, layout)
        split_context(stage, mesh, layout.cp_method)
        wrap_recompute(stage, layout.recompute)
        shard(stage, weights, experts, layout, precision)
        stage.to_empty(device=device)
    return stages


def cut_into_stages(model: ModelSpec, layout: Layout, precision: PrecisionSpec) -> Sequence[Decoder]:
    """Return the stages that this rank owns, on ``meta`` and whole, in the master precision."""
    num_stages = layout.pp * layout.stages_per_rank
    layers = stage_layers(model, num_stages, layout.stage_cuts)
    owners = stage_owner(layout.schedule, layout.pp, layout.stages_per_rank)
    pipeline_rank = layout.coordinate(dist.get_rank()).pp
    with torch.device("meta"):
        return [
            Decoder(model, layers[stage], is_first=stage == 0, is_last=stage == num_stages - 1).to(
                DTYPES[precision.master]
            )
            for stage in range(num_stages)
            if owners[stage] == pipeline_rank
        ]


def initialise(stages: Sequence[Decoder], model: ModelSpec, seed: int, layout: Layout) -> None:
    """Fill every weight with its initial bits (``triax.nn.init``): the same in every layout."""
    table = {weight.name: weight for weight in weights_table(model)}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            held = parameter.detach()
            local = held.to_local() if isinstance(held, DTensor) else held
            rows, columns = _held_ranges(table[name], layout)
            drawn = initial_rows(table[name], model, seed, rows.start, rows.stop)
            local.copy_(drawn if columns is None else drawn[:, columns.start : columns.stop])


def _held_ranges(weight: Weight, layout: Layout) -> tuple[range, range | None]:
    """Return the rows of the whole ``weight`` this rank holds, and the columns where tensor parallelism cuts those.

    Rows are cut by the ranks that share weights inside what ``tp`` leaves, those of experts inside what ``ep`` leaves,
    all as ``torch.chunk`` does it.
    """
    here = layout.coordinate(dist.get_rank())
    _, shard_index = layout.weight_place(dist.get_rank())
    rows, columns = range(weight.shape[0]), None
    if not weight.is_trained:
        return rows, None
    if weight.is_of_experts:
        _, shard_index, ep_index = layout.expert_place(dist.get_rank())
        return _chunk(_chunk(rows, layout.ep, ep_index), layout.expert_shards, shard_index), None
    if weight.tp_dim == 0:
        rows = _chunk(rows, layout.tp, here.tp)
    elif weight.tp_dim == 1 and layout.tp > 1:
        columns = _chunk(range(weight.shape[1]), layout.tp, here.tp)
    return _chunk(rows, layout.weight_shards, shard_index), columns


def _chunk(whole: range, parts: int, index: int) -> range:
    size = -(-len(whole) // parts)
    return whole[min(index * size, len(whole)) : min((index + 1) * size, len(whole))]


def make_executor(
    table: ScheduleTable, stages: Sequence[Decoder], layout: Layout, precision: PrecisionSpec, mesh: DeviceMesh,
    seq_len: int, device: torch.device, progress: Progress | None = None,
) -> Executor:  # fmt: skip
    """Return what runs ``table`` on this rank's ``stages`` and tells ``progress`` of every action."""
    progress = progress or Progress()
    if layout.pp == 1:
        return LocalExecutor(table, stages[0], layout, progress)
    return PipelineExecutor(table, stages, layout, mesh, seq_len, DTYPES[precision.compute], device, progress)
