"""Does every layout start from the same bits, under the names of the weights table?"""

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.harness.experts import with_experts
from tests.harness.pieces import Pieces, pieces_of, put_together
from tests.harness.ranks import run_ranks
from tests.harness.toy import ODD, lay, toy_run
from tests.harness.training import CPU, whole
from triax.nn.init import initial_rows
from triax.parallel.mesh import build_mesh
from triax.parallel.place import initialise, place
from triax.spec.layout import Layout
from triax.spec.model import ModelSpec
from triax.spec.run import Run
from triax.spec.weights import weights_table

# Rows for two blocks and a bit, so that shards begin and end inside blocks; and an embedding and a head of their own.
TALL = ModelSpec(
    hidden_size=12, intermediate_size=301, num_hidden_layers=1, num_attention_heads=2, head_dim=6, vocab_size=601
)

DEGREES: list[dict[str, object]] = [
    {"dp_shard": 1, "zero": 1},
    {"dp_replicate": 3, "zero": 0},
    {"dp_shard": 4, "zero": 3},
    {"dp_shard": 7, "zero": 2},
    {"dp_replicate": 2, "dp_shard": 3, "zero": 3},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 1, "order": ("dp_shard", "dp_replicate", "pp", "cp", "tp")},
]


@pytest.mark.parametrize("model", [ODD, TALL], ids=["odd", "tall"])
@pytest.mark.parametrize("degrees", DEGREES, ids=lambda degrees: " ".join(f"{k}={v}" for k, v in degrees.items()))
def test_initial_weights_have_the_same_bits_in_every_layout(degrees: dict[str, int], model: ModelSpec) -> None:
    run = toy_run(model, train={"sequences_per_step": 84, "seed": 5})
    layout = lay(run, **degrees)
    for wrong in run_ranks(differing_weights, layout.world_size, run, layout):
        assert wrong == []


def differing_weights(rank: int, world: int, run: Run, layout: Layout) -> list[str]:
    """Return what is wrong with the initial weights, whole and as this rank holds them."""
    stages = place(run.model, layout, run.precision, build_mesh(layout, "cpu"), CPU)
    initialise(stages, run.model, run.train.seed, layout)
    placed = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
    table = {weight.name: weight for weight in weights_table(run.model)}
    wrong = sorted(placed.keys() ^ table.keys())
    for name, weight in table.items():
        parameter = placed[name]
        expected = initial_rows(weight, run.model, run.train.seed, 0, weight.shape[0]).to(torch.float64)
        held = -(-weight.shape[0] // layout.dp_shard)
        first = min(held * layout.coordinate(rank).dp_shard, weight.shape[0])
        if not isinstance(parameter, DTensor) or parameter.dtype != torch.float64:
            wrong.append(f"{name} is no sharded weight in the master precision")
        elif not torch.equal(parameter.to_local(), expected[first : first + held]):
            wrong.append(f"{name} differs in the rows of rank {rank}")
        elif not torch.equal(whole(parameter), expected):
            wrong.append(f"{name} differs as a whole")
    return wrong


CUT_DEGREES: list[dict[str, object]] = [
    {"tp": 2},
    {"dp_shard": 3, "tp": 2, "zero": 3},
    {"dp_replicate": 2, "tp": 2, "zero": 0, "order": ("tp", "cp", "dp_shard", "dp_replicate", "pp")},
    {"pp": 3, "dp_shard": 2, "zero": 1},
    {"pp": 2, "schedule": "ZBVZeroBubble", "stages_per_rank": 2},
    {"pp": 2, "dp_shard": 2, "tp": 2, "zero": 2, "stage_cuts": (1, 4)},
]


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("degrees", CUT_DEGREES, ids=lambda degrees: " ".join(f"{k}={v}" for k, v in degrees.items()))
def test_parts_of_matrices_and_of_the_network_start_with_the_same_bits(degrees: dict[str, int], is_tied: bool) -> None:
    model = TALL.model_copy(update={"num_hidden_layers": 5, "tie_word_embeddings": is_tied})
    run = toy_run(model, train={"sequences_per_step": 12, "seed": 5})
    layout = lay(run, **degrees)
    wholes = put_together(run_ranks(initial_pieces, layout.world_size, run, layout))
    assert wholes.keys() == {weight.name for weight in weights_table(model)}
    for weight in weights_table(model):
        expected = initial_rows(weight, model, run.train.seed, 0, weight.shape[0]).to(torch.float64)
        assert torch.equal(wholes[weight.name], expected), weight.name


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp_shard": 4, "ep": 2, "zero": 3},
        {"dp_shard": 2, "tp": 2, "ep": 4, "zero": 1},
        {"dp_shard": 3, "tp": 2, "ep": 2, "zero": 2, "order": ("tp", "cp", "dp_shard", "dp_replicate", "pp")},
        {"pp": 2, "tp": 2, "ep": 2, "zero": 0},
        {"dp_replicate": 2, "tp": 2, "zero": 3},
    ],
    ids=lambda degrees: " ".join(f"{k}={v}" for k, v in degrees.items()),
)
def test_experts_start_with_the_same_bits_wherever_they_are(degrees: dict[str, int]) -> None:
    """Their rows are drawn in blocks that begin and end inside experts, and inside what a rank holds."""
    model = with_experts(
        TALL.model_copy(update={"num_hidden_layers": 2}), num_experts=4, moe_intermediate_size=75, selection_bias=True
    )
    run = toy_run(model, train={"sequences_per_step": 12, "seed": 5})
    layout = lay(run, **degrees)
    wholes = put_together(run_ranks(initial_pieces, layout.world_size, run, layout))
    for weight in weights_table(model):
        expected = initial_rows(weight, model, run.train.seed, 0, weight.shape[0]).to(torch.float64)
        assert torch.equal(wholes[weight.name], expected), weight.name


def initial_pieces(rank: int, world: int, run: Run, layout: Layout) -> Pieces:
    stages = place(run.model, layout, run.precision, build_mesh(layout, "cpu"), CPU)
    initialise(stages, run.model, run.train.seed, layout)
    return pieces_of(pair for stage in stages for pair in stage.named_parameters())
