"""How is one layer cut over the cards of a server: matrices by columns and rows, everything between them by sequence?

Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053) with sequence parallelism (Korthikanti et al. 2022,
arXiv:2205.05198), as two collectives around each half of a layer:

    residual stream (B, S/T, D) -> all-gather -> (B, S, D) -> columns -> own heads or own part of F -> rows
    -> partial sums (B, S, D) -> reduce-scatter -> (B, S/T, D)

A weight of 4096 x 14336 whose 14336 outputs are cut over 2 cards is outputs 0..7167 on the first and 7168..14335 on the
second. Which dim of which weight is cut stands in the weights table.

Parameters are DTensors over the ``tp`` axis, so that sharding, optimizer state and checkpoints need know nothing; the
arithmetic is on their local parts, with the collectives written out. Norms and the biases of row-cut matrices are whole
on every rank and see a part of the sequence each, so their gradients are partial: ``sum_replicated`` adds them up
once a step.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from triax.nn.decoder import Decoder
from triax.nn.embedding import look_up
from triax.nn.loss import Vocabulary
from triax.nn.moe import MixtureOfExperts, Router
from triax.nn.norm import RMSNorm
from triax.parallel.collectives import gather_sequence, scatter_sequence
from triax.spec.weights import Weight, weights_table


def split_tensors(stage: Decoder, mesh: DeviceMesh) -> None:
    """Cut the weights of ``stage`` over the ``tp`` axis of ``mesh`` and put the collectives around them, in place.

    Expects a stage on ``meta``. Sizes need not divide, except heads and the sequence as it is computed.
    """
    tensor = mesh["tp"]
    if tensor.size() == 1:
        return
    table = {weight.name: weight for weight in weights_table(stage.model)}
    group = tensor.get_group()
    for name, module in list(stage.named_modules()):
        if isinstance(module, nn.Linear | nn.Embedding | RMSNorm | Router):
            _cut_parameters(module, name, table, tensor)
    for layer in stage.layers.values():
        for child in layer.children():
            _split_block(child, group)
    if stage.is_first and stage.embed_tokens is not None:
        _become(stage.embed_tokens, VocabularyEmbedding, group)
    if stage.norm is not None:
        stage.norm.__class__ = LocalRMSNorm
        stage.norm.register_forward_hook(_gathers_output(group))
        stage.vocabulary = SplitVocabulary(stage.model.vocab_size, group)


def _split_block(block: nn.Module, group: dist.ProcessGroup) -> None:
    """Let a norm, an attention or a feed-forward network take and return this rank's part of the sequence.

    So does a mixture of experts by itself: each rank routes its own tokens, and experts are not cut.
    """
    if isinstance(block, RMSNorm):
        block.__class__ = LocalRMSNorm
    elif isinstance(block, MixtureOfExperts):
        block.gate.__class__ = LocalRouter
        if block.shared_experts is not None:
            _split_block(block.shared_experts, group)
    else:
        block.register_forward_pre_hook(_gathers_input(group))
        for child in block.children():
            _compute_locally(child, group)


def _cut_parameters(module: nn.Module, name: str, table: dict[str, Weight], tensor: DeviceMesh) -> None:
    for kind, parameter in list(module.named_parameters(recurse=False)):
        weight = table[f"{name}.{kind}"]
        if not weight.is_trained:
            continue
        placement = Replicate() if weight.tp_dim is None else Shard(weight.tp_dim)
        cut = distribute_tensor(parameter.detach(), tensor, [placement], src_data_rank=None)
        module.register_parameter(kind, nn.Parameter(cut))


def _compute_locally(module: nn.Module, group: dist.ProcessGroup) -> None:
    if isinstance(module, nn.Linear):
        assert isinstance(module.weight, DTensor)
        is_column = module.weight.placements == (Shard(0),)
        _become(module, ColumnLinear if is_column else RowLinear, group)
    elif isinstance(module, RMSNorm):
        module.__class__ = LocalRMSNorm


def _become(module: nn.Module, kind: type[nn.Module], group: dist.ProcessGroup) -> None:
    """Let ``module`` compute as ``kind`` from now on; its parameters and their names stay."""
    module.__class__ = kind
    module.group = group  # type: ignore[assignment]


def _gathers_input(group: dist.ProcessGroup) -> Any:
    def gather(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather_sequence(inputs[0], group), *inputs[1:]

    return gather


def _gathers_output(group: dist.ProcessGroup) -> Any:
    def gather(_module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return gather_sequence(output, group)

    return gather


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of ``parameter``; its gradient is that of the part alone."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class ColumnLinear(nn.Linear):
    """Its outputs are cut: each rank makes its own part from the whole input."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return this rank's outputs (B, S, outputs/T)."""
        bias: Tensor | None = self.bias
        return F.linear(x_BSD, local(self.weight), None if bias is None else local(bias))


class RowLinear(nn.Linear):
    """Its inputs are cut: each rank brings a partial sum, and keeps its part of the sequence of the whole sum."""

    group: dist.ProcessGroup

    def forward(self, x_BSF: Tensor) -> Tensor:
        """Return the outputs for this rank's part of the sequence, (B, S/T, D); a bias is added once, after the sum."""
        summed = scatter_sequence(F.linear(x_BSF, local(self.weight)), self.group)
        bias: Tensor | None = self.bias
        return summed if bias is None else summed + local(bias)


class LocalRMSNorm(RMSNorm):
    """A norm whose whole weight is on every rank."""

    def scale(self) -> Tensor:
        """Return the weight as a plain tensor."""
        return local(self.weight)


class LocalRouter(Router):
    """A router whose whole weight is on every rank."""

    def matrix(self) -> Tensor:
        """Return the weight as a plain tensor."""
        return local(self.weight)


class VocabularyEmbedding(nn.Embedding):
    """Its rows are cut: each rank looks up the tokens it has, and the others add zeros."""

    group: dist.ProcessGroup

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return the embeddings of this rank's part of the sequence, (B, S/T, D)."""
        rows = local(self.weight)
        start = _first_row(self.num_embeddings, self.group)
        is_here = (tokens_BS >= start) & (tokens_BS < start + rows.shape[0])
        places = torch.where(is_here, tokens_BS - start, 0)
        # A rank without rows still takes part in the sum, and in autograd.
        found = look_up(rows, places) if rows.shape[0] else rows.sum() + rows.new_zeros(*places.shape, rows.shape[1])
        return scatter_sequence(found * is_here.unsqueeze(-1), self.group)


def _first_row(rows: int, group: dist.ProcessGroup) -> int:
    """Return the first row of this rank where ``rows`` are cut as ``torch.chunk`` cuts them."""
    per_rank = -(-rows // group.size())
    return min(per_rank * group.rank(), rows)


class SplitVocabulary(Vocabulary):
    """Each rank scores its own part of the vocabulary; statistics of all of it are reduced."""

    def __init__(self, size: int, group: dist.ProcessGroup) -> None:
        self._size, self._group = size, group
        self.start = _first_row(size, group)

    def head(self, weight_VD: Tensor) -> Tensor:
        """Return this rank's rows of the head."""
        return local(weight_VD)

    def most_rows(self, head_VD: Tensor) -> int:
        """Return the rows of the first rank."""
        return -(-self._size // self._group.size())

    def maximum(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over all parts, without gradient."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values

    def total(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over all parts, without gradient."""
        dist.all_reduce(values, group=self._group)
        return values

    def gather(self, logits_BSV: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary."""
        per_rank = -(-self._size // self._group.size())
        padded = F.pad(logits_BSV, (0, per_rank - logits_BSV.shape[-1]))
        parts = [torch.empty_like(padded) for _ in range(self._group.size())]
        dist.all_gather(parts, padded.contiguous(), group=self._group)
        return torch.cat(parts, dim=-1)[..., : self._size]


def is_whole(parameter: nn.Parameter) -> bool:
    """Return whether every tp rank holds all of ``parameter`` (its share over the data axes apart)."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tp" in names and parameter.placements[names.index("tp")] == Replicate()


def sum_replicated(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Add up, over ``tp``, the gradients of weights that every tp rank holds whole: one all-reduce for all of them."""
    tensor = mesh["tp"]
    if tensor.size() == 1:
        return
    partial = [p.grad._local_tensor for p in parameters if is_whole(p) and isinstance(p.grad, DTensor)]
    if not partial:
        return
    flat = torch.cat([gradient.flatten() for gradient in partial])
    dist.all_reduce(flat, group=tensor.get_group())
    start = 0
    for gradient in partial:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()
