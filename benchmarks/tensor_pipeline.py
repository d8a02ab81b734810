"""How fast is a split network beside one split by torch's own ``parallelize_module`` and pipeline stages?

    python -m benchmarks.tensor_pipeline --layouts "tp=2" "pp=2 tp=2" --json -

Programs take turns (``benchmarks.paired``): triax as it trains; the same network under DTensor dispatch with the
sequence-parallel plan and ``loss_parallel`` of torch's documentation, in torch's 1F1B schedule where there is a
pipeline; and one rank that trains the whole step alone while the others wait. The first losses are compared, so that
all are the same mathematics.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.output import write_json
from benchmarks.paired import (
    Order,
    compare,
    initial_decoder,
    ratio,
    read_batches,
    take_turns,
    tokens_per_s,
    triax_steps,
)
from triax.data.batch import Batches
from triax.launch.workers import warm_up
from triax.nn.decoder import Decoder, Layer
from triax.nn.rope import Rotation
from triax.parallel.launch import peers, process_from_environment
from triax.spec.layout import Layout
from triax.spec.load import layout_words
from triax.spec.run import Run
from triax.spec.stages import stage_layers

SEQUENCES = 8
"""Of one step, whatever the layout: 2,048 tokens."""


class Stage(nn.Module):
    """Layers of a decoder in plain modules, with embedding or head where it is the first or the last part."""

    def __init__(self, whole: Decoder, layers: range, positions_BS: Tensor) -> None:
        super().__init__()
        self.model, self.positions_BS = whole.model, positions_BS
        self.embed_tokens = whole.embed_tokens if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(layer): whole.layers[str(layer)] for layer in layers})
        is_last = layers.stop == whole.model.num_hidden_layers
        self.norm = whole.norm if is_last else None
        self.lm_head = whole.lm_head if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states, or logits (B, S, V) of the last part."""
        hidden = x if self.embed_tokens is None else self.embed_tokens(x)
        rotation = Rotation.at(self.positions_BS[: len(x)], None, self.model, "global", hidden.dtype)
        for layer in cast(list[Layer], self.layers.values()):
            hidden = hidden + layer.self_attn(layer.get_submodule("input_layernorm")(hidden), rotation, None)
            hidden = hidden + layer.mlp(layer.get_submodule("post_attention_layernorm")(hidden))
        return hidden if self.norm is None or self.lm_head is None else self.lm_head(self.norm(hidden))


def split(stage: Stage, mesh: DeviceMesh) -> None:
    """Split ``stage`` over ``mesh`` by the plan of torch's tensor-parallel tutorial, with sequence parallelism."""
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    attention = PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    for layer in stage.layers.values():
        parallelize_module(
            layer,
            mesh,
            {
                "input_layernorm": SequenceParallel(), "self_attn": attention,
                "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
                "post_attention_layernorm": SequenceParallel(), "mlp": whole,
                "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            },
        )  # fmt: skip
    plan: dict[str, Any] = {}
    if stage.embed_tokens is not None:
        plan["embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if stage.norm is not None:
        plan["norm"] = SequenceParallel()
        plan["lm_head"] = ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        )  # fmt: skip
    parallelize_module(stage, mesh, plan)


def dtensor_steps(run: Run, layout: Layout, batches: Batches) -> Callable[[], float]:
    """Return a function that takes one step under DTensor dispatch, and returns its loss where it is known."""
    mesh = init_device_mesh("cpu", (layout.pp, layout.tp), mesh_dim_names=("pp", "tp"))
    index = mesh["pp"].get_local_rank()
    tokens, positions, labels = _whole_step(run, batches)
    stage = Stage(initial_decoder(run), stage_layers(run.model, layout.pp, None)[index], positions)
    split(stage, mesh["tp"])
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3, fused=True)
    count = labels.numel()

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count

    losses: list[Tensor] = []
    if layout.pp == 1:

        def accumulate() -> None:
            for x, y in zip(tokens.chunk(layout.microbatches), labels.chunk(layout.microbatches), strict=True):
                with loss_parallel():
                    loss = loss_of(stage(x), y)
                    loss.backward()
                losses.append(cast(DTensor, loss).full_tensor().detach())
    else:
        part = PipelineStage(stage, index, layout.pp, torch.device("cpu"), group=mesh["pp"].get_group())
        schedule = Schedule1F1B(part, layout.microbatches, loss_fn=loss_of, scale_grads=False)

        def accumulate() -> None:
            with loss_parallel():
                if index == 0:
                    schedule.step(tokens)
                elif index == layout.pp - 1:
                    schedule.step(target=labels, losses=losses)
                else:
                    schedule.step()

    def step() -> float:
        losses.clear()
        accumulate()
        _clip(stage, mesh)
        optimizer.step()
        optimizer.zero_grad()
        return sum(float(loss.detach()) for loss in losses) if losses else float("nan")

    return step


def _clip(stage: Stage, mesh: DeviceMesh) -> None:
    gradients = [weight.grad for weight in stage.parameters() if weight.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    square = (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    if mesh["pp"].size() > 1:
        dist.all_reduce(square, group=mesh["pp"].get_group())
    torch.nn.utils.clip_grads_with_norm_(list(stage.parameters()), 1.0, square.sqrt())


def alone_steps(run: Run, layout: Layout, batches: Batches) -> Callable[[], float]:
    """Return a function with which rank 0 takes the whole step, and the others none."""
    if dist.get_rank() != 0:
        return lambda: float("nan")
    model = initial_decoder(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens, positions, labels = _whole_step(run, batches)
    parts = layout.microbatches

    def step() -> float:
        total = 0.0
        for x, p, y in zip(tokens.chunk(parts), positions.chunk(parts), labels.chunk(parts), strict=True):
            loss = model(x, p, None, y) / labels.numel()
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _whole_step(run: Run, batches: Batches) -> tuple[Tensor, Tensor, Tensor]:
    batch = batches.microbatch(0, 0, 0, 1, run.sequences_per_step, 1)
    tokens, positions, labels = map(torch.from_numpy, (batch.tokens, batch.positions, batch.labels))
    return tokens, positions, labels


def work(order: Order) -> None:
    """Measure on one rank; rank 0 writes what it saw."""
    run, layout = Run.model_validate_json(order.run), Layout.model_validate_json(order.layout)
    process = process_from_environment()
    torch.manual_seed(0)
    with peers(process, 300.0):
        batches = read_batches(run)
        programs = {
            "triax": triax_steps(run, layout, process, batches, Path(order.folder)),
            "dtensor": dtensor_steps(run, layout, batches),
            "alone": alone_steps(run, layout, batches),
        }
        first_losses = {name: _known(step()) for name, step in programs.items()}
        for name, loss in first_losses.items():
            assert abs(loss - first_losses["alone"]) < 1e-4, f"{name} starts at {first_losses}"
        seconds = take_turns(programs, order.pairs)
        if process.rank == 0:
            order.save(seconds)


def _known(loss: float) -> float:
    """Return the loss of a rank that knows it."""
    losses: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(losses, loss)
    return next(loss for loss in losses if loss == loss)


def main() -> int:
    """Print one JSON object: a row for each layout."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--layouts", nargs="+", default=["tp=2", "pp=2 tp=2 microbatches=4"])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", default="-")
    arguments = parser.parse_args()
    rows = []
    warm_up("torch", "torch.distributed.pipelining", "torch.distributed.tensor.parallel", num_ranks=4)
    for words in arguments.layouts:
        said = dict(word.removeprefix("layout.").split("=") for word in layout_words(words))
        layout = Layout.model_validate({key: int(value) for key, value in said.items()})
        layout = layout.model_copy(update={"sequences_per_microbatch": SEQUENCES // layout.microbatches})
        run, seconds = compare(work, layout, SEQUENCES, arguments.pairs)
        rows.append(
            {
                "layout": layout.describe(),
                "tokens_per_s": tokens_per_s(run, seconds),
                "triax_over_dtensor": ratio(seconds["dtensor"], seconds["triax"]),
                "triax_over_one_rank": ratio(seconds["alone"], seconds["triax"]),
            }
        )
    write_json({"pairs": arguments.pairs, "rows": rows}, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
