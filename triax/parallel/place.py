"""How does a network become the part of it that this rank holds? One function that reads like a recipe."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from triax.nn.decoder import Decoder
from triax.nn.init import initial_rows
from triax.parallel.recompute import wrap_recompute
from triax.parallel.shard import DTYPES, shard
from triax.spec.layout import Layout
from triax.spec.model import ModelSpec
from triax.spec.run import PrecisionSpec
from triax.spec.weights import weights_table


def place(
    model: ModelSpec, layout: Layout, precision: PrecisionSpec, mesh: DeviceMesh, device: torch.device
) -> Sequence[Decoder]:
    """Return this rank's stages of ``model``, laid out as ``layout`` says, with memory but without values.

    Each step does nothing at degree one inside itself. Weights are DTensors in the master precision under the names of
    the weights table. Fill them with ``initialise`` or from a checkpoint.
    """
    stages = cut_into_stages(model, precision)
    for stage in stages:
        wrap_recompute(stage, layout.recompute)
        shard(stage, mesh, layout, precision)
        stage.to_empty(device=device)
    return stages


def cut_into_stages(model: ModelSpec, precision: PrecisionSpec) -> Sequence[Decoder]:
    """Return the stages that this rank owns, on ``meta`` and whole, in the master precision."""
    with torch.device("meta"):
        return [Decoder(model).to(DTYPES[precision.master])]


def initialise(stages: Sequence[Decoder], model: ModelSpec, seed: int) -> None:
    """Fill every weight with its initial bits (``triax.nn.init``): the same in every layout."""
    table = {weight.name: weight for weight in weights_table(model)}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            local, start = _local_rows(parameter)
            local.copy_(initial_rows(table[name], model, seed, start, start + local.shape[0]))


def _local_rows(parameter: nn.Parameter) -> tuple[torch.Tensor, int]:
    """Return the rows this rank holds and the index of the first of them."""
    data = parameter.detach()
    if not isinstance(data, DTensor):
        return data, 0
    _, offset = compute_local_shape_and_global_offset(data.shape, data.device_mesh, data.placements)
    return data.to_local(), offset[0]
