"""How do pipeline ranks run one schedule table together, by torch's pipelining runtime?

The table is ours (``triax.spec.schedule``); torch lowers it to sends, receives, gathers and reductions. Parts of that
API are private: everything that touches them is in this file, and a contract test runs every schedule through it.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _add_unshard_reshard,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from triax.nn.decoder import Decoder
from triax.parallel.execute import Microbatch
from triax.parallel.progress import Progress
from triax.parallel.shard import before_backward, release
from triax.spec.layout import Layout
from triax.spec.schedule import Action, ScheduleTable

_MOST_FORWARDS_PER_RANK: Final = 4
"""Microbatches of an evaluation that are under way at once, for each pipeline rank (*assumed*): a fifth is idle."""


class PipelineExecutor:
    """Runs this rank's row of a table, together with the other ranks of the ``pp`` axis."""

    def __init__(
        self, table: ScheduleTable, stages: Sequence[Decoder], layout: Layout, mesh: DeviceMesh, seq_len: int,
        compute_dtype: torch.dtype, device: torch.device, progress: Progress,
    ) -> None:  # fmt: skip
        """``stages`` are those of this rank, in the order of ``table.stages_of``."""
        self._table, self._stages, self._layout, self._device = table, stages, layout, device
        self._progress = progress
        self._group = mesh["pp"].get_group()
        self._actions = tuple(table.actions(self._group.rank()))
        self._shapes = _Shapes(layout, seq_len, stages[0].model.hidden_size, compute_dtype)
        self._scale = torch.ones((), device=device)
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        self._training = self._runtime(layout.microbatches, self._scaled_loss)
        rows = enumerate(table.to_csv().splitlines())
        actions = {rank: [_Action.from_str(word) for word in row.split(",")] for rank, row in rows}
        self._training._prepare_schedule_with_comms(actions)
        self._forward_only: dict[int, _PipelineScheduleRuntime] = {}

    def execute(self, batches: Sequence[Microbatch], scale: Tensor) -> Tensor:
        """See ``Executor.execute``."""
        self._scale = scale
        self._total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._progress.follow(self._actions)
        self._step(self._training, batches)
        return self._total

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Microbatch]) -> Tensor:
        """See ``Executor.evaluate``."""
        self._total = torch.zeros((), dtype=torch.float64, device=self._device)
        # torch keeps what stages hand on until the end, so that a long list is walked in parts.
        most = _MOST_FORWARDS_PER_RANK * self._table.pp
        for first in range(0, len(batches), most):
            self._forward(batches[first : first + most])
        for stage in self._stages:
            release(stage)
        return self._total

    def _forward(self, batches: Sequence[Microbatch]) -> None:
        count = len(batches)
        if count not in self._forward_only:
            self._forward_only[count] = self._runtime(count, None)
            _prepare_forwards(self._forward_only[count], self._table, count)
        mine = self._table.stages_of(self._group.rank())
        self._progress.follow([Action(stage, "F", batch) for stage in mine for batch in range(count)])
        self._step(self._forward_only[count], batches)

    def _runtime(self, microbatches: int, loss: Callable[..., Tensor] | None) -> _PipelineScheduleRuntime:
        stages = [
            ZeroStage(
                stage, index, self._table.num_stages, self._device, self._group, self._layout.zero, self._shapes,
                self._progress,
            )
            for index, stage in zip(self._table.stages_of(self._group.rank()), self._stages, strict=True)
        ]  # fmt: skip
        runtime = _PipelineScheduleRuntime(list(stages), microbatches, loss_fn=loss, scale_grads=False)
        for stage in stages:
            stage.has_backward = loss is not None  # torch sets it in its own step(), which cuts batches its own way
        if self._layout.zero == 3:
            # Each layer is gathered when its turn comes; torch would gather the whole stage for the whole step.
            runtime.register_custom_function(_ComputationType.UNSHARD, _mark_unsharded)
            runtime.register_custom_function(_ComputationType.RESHARD, _mark_resharded)
        return runtime

    def _scaled_loss(self, loss: Tensor, _target: Tensor) -> Tensor:
        self._total += loss.detach()
        return loss * self._scale.to(loss.dtype)

    def _step(self, runtime: _PipelineScheduleRuntime, batches: Sequence[Microbatch]) -> None:
        arguments = [(batch.tokens,) for batch in batches]
        keywords = [
            {"positions_BS": batch.positions, "cu_seqlens": batch.cu_seqlens, "labels_BS": batch.labels}
            for batch in batches
        ]
        targets = [batch.labels for batch in batches]
        is_training = runtime is self._training
        runtime._step_microbatches(arguments, keywords, targets, return_outputs=not is_training)
        for stage in runtime._stages:
            if stage.is_last and not is_training:
                self._total += torch.stack(stage.output_chunks).sum()
            stage.clear_runtime_states()


def _prepare_forwards(runtime: _PipelineScheduleRuntime, table: ScheduleTable, count: int) -> None:
    """Give ``runtime`` the forwards of ``count`` microbatches; torch's own preparation refuses them alone."""
    owners = dict(enumerate(table.owners))
    runtime.stage_index_to_group_rank = owners
    for stage in runtime._stages:
        stage.stage_index_to_group_rank = owners
    rows = {}
    for rank in range(table.pp):
        places = product(table.stages_of(rank), range(count))
        rows[rank] = _add_unshard_reshard([_Action(stage, _ComputationType.FORWARD, batch) for stage, batch in places])
    runtime.pipeline_order_with_comms = _add_send_recv(rows, owners.__getitem__, table.num_stages)


def _mark_unsharded(action: _Action, ctx: Any) -> None:
    ctx.schedule_ref.unsharded_stages.add(action.stage_index)


def _mark_resharded(action: _Action, ctx: Any) -> None:
    schedule = ctx.schedule_ref
    schedule.unsharded_stages.discard(action.stage_index)
    for stage in schedule._stages:
        if stage.stage_index == action.stage_index:
            release(stage.submod)


class _Shapes:
    """What stages hand to each other, known beforehand so that no step is spent on finding out."""

    def __init__(self, layout: Layout, seq_len: int, hidden_size: int, dtype: torch.dtype) -> None:
        batch = layout.sequences_per_microbatch
        self.tokens = torch.empty(batch, seq_len, dtype=torch.int64, device="meta")
        self.hidden = torch.empty(batch, seq_len // (layout.cp * layout.tp), hidden_size, dtype=dtype, device="meta")
        self.hidden.requires_grad_()
        self.loss = torch.empty((), dtype=torch.promote_types(dtype, torch.float32), device="meta").requires_grad_()


class ZeroStage(PipelineStage):
    """A stage whose gradients are reduced, and weights kept or dropped, as its ZeRO stage says; it tells its progress.

    torch's own keeps everything until the end of the step, which is stage 1 (and 0). Here stages 2 and 3 reduce after
    each backward; where a schedule splits backwards, after the part that makes the gradients of weights.
    """

    def __init__(
        self, module: Decoder, index: int, num_stages: int, device: torch.device, group: dist.ProcessGroup, zero: int,
        shapes: _Shapes, progress: Progress,
    ) -> None:  # fmt: skip
        is_first, is_last = index == 0, index == num_stages - 1
        super().__init__(
            module, index, num_stages, device, group=group,
            input_args=shapes.tokens if is_first else shapes.hidden,
            output_args=shapes.loss if is_last else shapes.hidden,
        )  # fmt: skip
        self._zero, self._progress = zero, progress

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run one forward, whose inputs have arrived."""
        self._progress.begin(Action(self.stage_index, "F", fwd_chunk_id))
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._progress.end()
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run one backward, or its first part, whose inputs have arrived."""
        self._progress.begin(Action(self.stage_index, "B" if full_backward else "I", bwd_chunk_id))
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._progress.end()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the second part of one backward."""
        self._progress.begin(Action(self.stage_index, "W", bwd_chunk_id))
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._progress.end()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce what gradients were not reduced in the backwards."""
        self._progress.enter_phase(f"reducing the gradients of stage {self.stage_index}")
        super().perform_reduce_grad(grad_scale_factor)
        self._progress.wait()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run one backward of ``backward_type`` full, input or weight."""
        module = cast(Decoder, self.submod)
        if self._zero < 2:
            result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            if backward_type == "weight":
                _take_gradients(module)
            return result
        if backward_type == "full":
            before_backward(module, self._zero, is_last_microbatch=last_backward)
            return stage_backward(
                bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
            ), None
        # Nothing is reduced or dropped before both parts are through: where activations are recomputed, the gradients
        # of weights come in several passes, and each needs the weights gathered.
        before_backward(module, 1, is_last_microbatch=False)
        if backward_type == "input":
            return stage_backward_input(
                bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"], module.parameters()
            )
        result = stage_backward_weight(module.parameters(), bwd_kwargs["param_groups"]), None
        _take_gradients(module)
        before_backward(module, self._zero, is_last_microbatch=last_backward)
        _take_gradients(module)
        return result


def _take_gradients(module: Decoder) -> None:
    """Let ``fully_shard`` add up or reduce the gradients of weights, which came without the hooks that let it.

    The head has its gradient since the first part of the backward. All must be in the reduce dtype before any is
    reduced: call this once for the sum before it is called for the reduction.
    """
    for state in fully_shard.state(module)._state_ctx.all_states:  # type: ignore[attr-defined]
        for group in state._fsdp_param_groups:
            group.post_backward()
