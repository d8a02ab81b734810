"""Which numbers must all ranks agree on, and how are they summed: counts, losses, and one gradient norm.

Everything here works on local tensors with explicit collectives, so that what crosses a link can be read in the code.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from triax.parallel.expert import is_of_experts
from triax.parallel.tensor import is_whole
from triax.spec.layout import Layout


@dataclass(frozen=True, slots=True)
class StepSums:
    """What a step came to, the same bits on every rank, still on the device."""

    loss: Tensor
    """Mean cross-entropy over the tokens of the step that count."""
    grad_norm: Tensor
    """Euclidean norm of the whole model's gradient, before clipping."""
    flags: Tensor
    """How many ranks raised each flag."""
    seen: Tensor
    """What all ranks saw of their experts, see ``triax.parallel.expert.ExpertLoad``; empty where there are none."""


def count_over_data(local_count: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Return the number of tokens that count, summed over the data ranks, in fp64 (exact up to 2^53)."""
    count = torch.tensor(float(local_count), dtype=torch.float64, device=device)
    dist.all_reduce(count, group=group)
    return count


def sum_step(
    loss_sum: Tensor, count: Tensor, parameters: Iterable[nn.Parameter], flags: Sequence[bool], seen: Tensor,
    layout: Layout,
) -> StepSums:  # fmt: skip
    """Return the loss, the gradient norm and the flags of a step with one all-reduce of a few numbers over all ranks.

    Ranks that hold the same gradient bring equal parts of its square: replicas, and tp ranks of a weight they do not
    cut. So do tp ranks of a loss, which each of them has whole; cp ranks have that of their own positions. ``seen`` is
    summed along.
    """
    by_copies: dict[int, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_copies.setdefault(_copies(parameter, layout), []).append(parameter)
    squares = torch.zeros((), dtype=torch.float64, device=loss_sum.device)
    for copies, alike in by_copies.items():
        squares += _sum_of_squares(local_gradients(alike), loss_sum.device) / copies
    loss_sum = loss_sum / layout.tp
    raised = torch.tensor([float(flag) for flag in flags], dtype=torch.float64, device=loss_sum.device)
    sums = torch.cat((torch.stack((loss_sum.to(torch.float64), squares)), raised, seen))
    dist.all_reduce(sums)
    first_seen = 2 + len(flags)
    return StepSums(sums[0] / count, sums[1].sqrt(), sums[2:first_seen], sums[first_seen:])


def _copies(parameter: nn.Parameter, layout: Layout) -> int:
    """Return how many ranks hold the same part of ``parameter``."""
    if is_of_experts(parameter):
        return layout.expert_replicas
    return layout.weight_replicas * (layout.tp if is_whole(parameter) else 1)


def mean_over_ranks(loss_sum: Tensor, count: int, layout: Layout) -> float:
    """Return the mean loss over all data ranks, whichever ranks have the loss: every rank gets the same number.

    ``count`` is that of this rank's tokens, which every pp, cp and tp rank of a data rank counts equally.
    """
    counted = torch.tensor(count / (layout.tp * layout.cp * layout.pp), dtype=torch.float64, device=loss_sum.device)
    sums = torch.stack((loss_sum.to(torch.float64) / layout.tp, counted))
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def _sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    held = [gradient for gradient in gradients if gradient.numel()]
    if not held:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(held)).to(torch.float64).square().sum()


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return this rank's shard of every gradient there is, as plain tensors that share its memory."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient._local_tensor if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def clip(gradients: Sequence[Tensor], grad_norm: Tensor, max_grad_norm: float) -> None:
    """Scale ``gradients`` down in place so that their norm is at most ``max_grad_norm`` (Pascanu et al. 2012,
    arXiv:1211.5063); the host never waits for the norm."""
    scale = (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, same in by_dtype.items():
        torch._foreach_mul_(same, scale.to(dtype))
