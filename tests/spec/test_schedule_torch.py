"""Are our schedule tables as good as torch's own or better, and does torch's runtime get the right gradients by them?

The contract with the private parts of torch that run a table: a new torch that breaks one of them fails here.
"""

import itertools

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from tests.harness.ranks import run_ranks
from triax.spec.schedule import (
    SCHEDULES,
    Action,
    Overlap,
    ScheduleTable,
    Slot,
    build,
    price,
    unit_cost,
)

DIM = 6
SIZES = list(itertools.product((2, 3, 4), (2, 3, 4, 6, 8, 9, 12)))


def torch_table(name: str, pp: int, stages_per_rank: int, microbatches: int) -> ScheduleTable | None:
    """What torch's generator makes, proved by our ``validate``; None where it refuses the sizes."""
    try:
        rows = get_schedule_ops(name, pp, microbatches, stages_per_rank)
    except ValueError:
        return None
    cells = [[str(action) for action in row if action is not None and "REDUCE_GRAD" not in str(action)] for row in rows]
    if name == "1F1B":
        # torch 2.13 numbers the forwards of the last rank from 1: its 1F1B runs by code, not by this table.
        forwards = [cell for cell in cells[-1] if "F" in cell]
        if forwards[0].endswith("F1"):
            renumbered = {cell: f"{pp - 1}F{number}" for number, cell in enumerate(forwards)}
            cells[-1] = [renumbered.get(cell, cell) for cell in cells[-1]]
    return ScheduleTable.from_csv(name, "\n".join(map(",".join, cells)))


def split_costs(slot: Slot) -> float:
    """Durations as of a real block: I takes longer than W, and a whole backward less than both."""
    return sum({"F": 1.0, "I": 1.2, "W": 0.8, "B": 1.9}[action.kind] for action in slot.parts)


def work(table: ScheduleTable) -> dict[str, list[tuple[int, int]]]:
    """What is computed, by kind; the split backwards of stage 0, which torch runs in one at W, count as whole."""
    actions = [action for rank in range(table.pp) for action in table.actions(rank)]
    done: dict[str, list[tuple[int, int]]] = {kind: [] for kind in "FBIW"}
    for action in actions:
        if action.stage > 0 or action.kind in "FB":
            done[action.kind].append((action.stage, action.microbatch))
        elif action.kind == "W":
            done["B"].append((0, action.microbatch))
    return {kind: sorted(places) for kind, places in done.items()}


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_our_tables_do_the_same_work_never_later_and_never_hold_more(name: str) -> None:
    kind = SCHEDULES[name]
    compared = 0
    for pp, microbatches in SIZES:
        for stages_per_rank in range(min(kind.max_stages_per_rank or 3, 2), (kind.max_stages_per_rank or 3) + 1):
            theirs = torch_table(name, pp, stages_per_rank, microbatches)
            if theirs is None:
                continue
            ours = build(name, pp, stages_per_rank, microbatches)
            compared += 1
            assert work(ours) == work(theirs)
            for cost, send_s in itertools.product((unit_cost, split_costs), (0.0, 0.25)):
                ours_s, theirs_s = price(ours, cost, send_s).makespan_s, price(theirs, cost, send_s).makespan_s
                assert ours_s <= theirs_s + 1e-9, (pp, stages_per_rank, microbatches)
            for rank in range(pp):
                assert ours.max_in_flight(rank) <= theirs.max_in_flight(rank)
    assert compared >= 10


def as_torch(slot: Slot) -> _Action:
    action = _Action.from_str(str(slot))
    assert isinstance(action, _Action)
    return action


def test_torch_reads_our_text_form() -> None:
    assert as_torch(Action(12, "I", 345)) == _Action.from_str("12I345")
    pair = as_torch(Overlap(Action(0, "F", 3), Action(3, "B", 1)))
    assert pair.sub_actions == (as_torch(Action(0, "F", 3)), as_torch(Action(3, "B", 1)))


class Block(nn.Module):
    """One stage: not linear, so that a wrong or missing input gradient shows in the weights below it."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM, dtype=torch.float64)
        self.down = nn.Linear(2 * DIM, DIM, dtype=torch.float64)
        generator = torch.Generator().manual_seed(stage)
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        delta: Tensor = self.down(torch.tanh(self.up(x)))
        return x + delta


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1234)
    inputs, targets = torch.randn(2, 2 * microbatches, DIM, generator=generator, dtype=torch.float64)
    return inputs, targets


def summed_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def gradients_of(stages: dict[int, Block]) -> dict[str, Tensor]:
    found = {}
    for stage, block in stages.items():
        for name, weight in block.named_parameters():
            assert weight.grad is not None, f"{stage}.{name} got no gradient"
            found[f"{stage}.{name}"] = weight.grad
    return found


def one_process(num_stages: int, microbatches: int) -> tuple[dict[str, Tensor], float]:
    """Gradients and loss of the whole model, microbatch by microbatch, by plain autograd."""
    blocks = {stage: Block(stage) for stage in range(num_stages)}
    inputs, targets = batch(microbatches)
    total = 0.0
    for x, target in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
        for block in blocks.values():
            x = block(x)
        loss = summed_loss(x, target)
        loss.backward()
        total += loss.item()
    return gradients_of(blocks), total


def run_table(table: ScheduleTable, rank: int) -> tuple[dict[str, Tensor], float | None]:
    """Run one step of ``table`` on this rank by torch's runtime; return its gradients, and the loss if it has it."""
    blocks = {stage: Block(stage) for stage in table.stages_of(rank)}
    stages = [PipelineStage(block, stage, table.num_stages, torch.device("cpu")) for stage, block in blocks.items()]
    runtime = _PipelineScheduleRuntime(stages, table.microbatches, loss_fn=summed_loss, scale_grads=False)
    runtime._prepare_schedule_with_comms({r: [as_torch(slot) for slot in row] for r, row in enumerate(table.rows)})
    inputs, targets = batch(table.microbatches)
    losses: list[Tensor] = []
    reads = (inputs,) if 0 in blocks else ()
    if table.num_stages - 1 not in blocks:
        runtime.step(*reads, return_outputs=False)
        return gradients_of(blocks), None
    runtime.step(*reads, target=targets, losses=losses, return_outputs=False)
    return gradients_of(blocks), sum(loss.item() for loss in losses)


EXECUTED = {
    2: [
        *((name, 1, 5) for name in ("GPipe", "1F1B", "InterleavedZeroBubble")),
        *((name, 2, 5) for name in SCHEDULES if name not in ("GPipe", "1F1B")),
        # Sizes that torch's own classes refuse, or that do not fill the pipeline.
        ("1F1B", 1, 1),
        ("Interleaved1F1B", 3, 1),
        ("ZBVZeroBubble", 2, 2),
        ("DualPipeV", 2, 3),
    ],
    4: [
        ("1F1B", 1, 6),
        ("Interleaved1F1B", 2, 9),
        ("InterleavedZeroBubble", 1, 6),
        ("ZBVZeroBubble", 2, 8),
        ("DualPipeV", 2, 9),
    ],
}


def run_all_tables(rank: int, world: int) -> list[tuple[dict[str, Tensor], float | None]]:
    return [run_table(build(name, world, stages, microbatches), rank) for name, stages, microbatches in EXECUTED[world]]


@pytest.mark.parametrize("pp", EXECUTED)
def test_torch_runs_our_tables_to_the_gradients_of_one_process(pp: int) -> None:
    by_rank = run_ranks(run_all_tables, pp)
    for (name, stages_per_rank, microbatches), *parts in zip(EXECUTED[pp], *by_rank, strict=True):
        expected, expected_loss = one_process(pp * stages_per_rank, microbatches)
        merged = {key: gradient for gradients, _ in parts for key, gradient in gradients.items()}
        assert merged.keys() == expected.keys()
        for key, gradient in merged.items():
            off = (gradient - expected[key]).abs().max() / expected[key].abs().max()
            assert off <= 1e-9, f"{name}: the gradient of {key} is off by {off:.1e} of its largest entry"
        (loss,) = [loss for _, loss in parts if loss is not None]
        assert loss == pytest.approx(expected_loss, rel=1e-9)
