"""What does each data rank hold: everything, or its share of optimizer state, gradients and weights?

The ZeRO stages (Rajbhandari et al. 2019, arXiv:1910.02054) are four settings of torch's ``fully_shard``. Bytes per
parameter that a rank holds between microbatches, with bf16 compute, fp32 master and fp32 reduce, on N ranks that share:
those of ``dp_shard`` and, as they need the same weights for other positions, those of ``cp``:

    stage  master  compute copy  gradients  Adam   sum          when gradients are reduced
    0      4       -             4          8      16           once a step (all-reduce)
    1      4/N     2             4          8/N    6 + 12/N     once a step (reduce-scatter)
    2      4/N     2             4/N        8/N    2 + 16/N     every microbatch (reduce-scatter)
    3      4/N     -             4/N        8/N    16/N         every microbatch (reduce-scatter)

Under stages 1 and 2 weights are gathered once a step. Under stage 3 layers are gathered for every forward and again
for every backward, and what stands outside the layers (embedding, last norm, head) once for both: a backward begins
where its forward ended, so letting go in between would save no memory at the peak. Replicas of shards
(``dp_replicate``) all-reduce what they hold of the gradients once a step.

``fully_shard`` is applied at every degree, also at one: mixed precision is then the same everywhere.
"""

from collections.abc import Callable
from typing import Final, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

from triax.nn.decoder import Decoder
from triax.parallel.expert import mixtures, selection_biases
from triax.spec.layout import Layout
from triax.spec.run import PrecisionSpec

DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def shard(
    stage: Decoder, mesh: DeviceMesh, experts: DeviceMesh | None, layout: Layout, precision: PrecisionSpec
) -> None:
    """Share the weights of ``stage`` over the data axes: one group of collectives for each layer, one for the rest.

    ``mesh`` is that of ``weight_mesh``. Under stage 0 the shard axis has one rank, so only the all-reduce over replicas
    remains. ``experts`` is the mesh of ``expert_mesh``: where there is one, the experts of a layer are a group of their
    own.
    """
    data = mesh["replicate", "shard"] if layout.weight_replicas > 1 else mesh["shard"]
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[precision.compute], reduce_dtype=DTYPES[precision.reduce], cast_forward_inputs=False
    )
    whole = selection_biases(stage)
    placement = None if experts is None else _placement(stage, experts, layout)
    for layer in stage.layers.values():
        fully_shard(
            layer, mesh=data, mp_policy=policy, reshard_after_forward=layout.zero == 3, shard_placement_fn=placement,
            ignored_params=whole,
        )  # fmt: skip
    fully_shard(stage, mesh=data, mp_policy=policy, reshard_after_forward=False, ignored_params=whole)


def _placement(
    stage: Decoder, experts: DeviceMesh, layout: Layout
) -> Callable[[nn.Parameter], ShardPlacementResult | None]:
    """Return on which mesh a weight is shared: None is that of all others.

    Experts have no ``fully_shard`` of their own, which would stand inside what recompute runs twice. ``fully_shard``
    documents this way for them; the classes that say it lie in a private module of torch 2.13.
    """
    mesh_info = FSDPMeshInfo(experts["expert_shard"], shard_mesh_dim=0)
    if layout.expert_replicas > 1:
        of_experts = experts["expert_replicate", "expert_shard"]
        mesh_info = HSDPMeshInfo(of_experts, shard_mesh_dim=1, replicate_mesh_dim=0)
    theirs = ShardPlacementResult(placement=Shard(0), mesh_info=mesh_info)
    weights = {weight for _, mixture in mixtures(stage) for weight in mixture.experts.parameters()}
    return lambda weight: theirs if weight in weights else None


def before_backward(stage: Decoder, zero: int, *, is_last_microbatch: bool) -> None:
    """Tell ``stage`` what the coming backward does with gradients and gathered weights: the table above."""
    module = cast(FSDPModule, stage)
    # To fully_shard, "last" means: wait for what is being reduced and drop its buffers. Every backward that reduces
    # must, or the unreduced gradients of embedding and head would stay in memory through the next forward.
    module.set_is_last_backward(is_last_microbatch or zero >= 2)
    module.set_requires_gradient_sync(is_last_microbatch or zero >= 2)
    module.set_requires_all_reduce(is_last_microbatch)
    module.set_reshard_after_backward(is_last_microbatch or zero in (0, 3))


def release(stage: Decoder) -> None:
    """Drop weights that a forward without a backward left gathered, so that the next step gathers fresh ones."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
