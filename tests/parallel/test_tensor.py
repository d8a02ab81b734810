"""Which part of which matrix has each card, and do the collectives between parts come out right, both ways?"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.harness.ranks import run_ranks
from tests.harness.toy import ODD
from triax.checkpoint.state import Box, local_slices
from triax.nn.decoder import Decoder
from triax.parallel.collectives import gather_sequence, scatter_sequence
from triax.parallel.mesh import build_mesh
from triax.parallel.tensor import split_tensors
from triax.spec.layout import Layout
from triax.spec.model import ModelSpec
from triax.spec.weights import weights_table

LLAMA_3_1_8B = ModelSpec(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256,
)  # fmt: skip
GATE, DOWN = "layers.0.mlp.gate_proj.weight", "layers.0.mlp.down_proj.weight"


def boxes_on_meta(rank: int, world: int, model: ModelSpec) -> dict[str, tuple[Box, tuple[int, ...], bool]]:
    """Return where this rank's part of each weight lies in the whole, its shape, and whether it is all of it."""
    with torch.device("meta"):
        stage = Decoder(model)
    split_tensors(stage, build_mesh(Layout(tp=world), "cpu"))
    parts = {}
    for name, weight in stage.named_parameters():
        assert isinstance(weight, DTensor)
        assert weight.device.type == "meta"
        (piece,) = local_slices(weight)
        parts[name] = (piece.box, tuple(weight.to_local().shape), weight.placements == (Replicate(),))
    return parts


def test_a_4096_x_14336_matrix_over_2_cards_is_columns_1_to_7168_and_7169_to_14336() -> None:
    """torch writes a matrix that makes 14336 outputs of 4096 inputs as (14336, 4096): its columns, in the notation
    x W, are rows there, and the table says that tensor parallelism cuts these."""
    table = {weight.name: weight for weight in weights_table(LLAMA_3_1_8B)}
    inputs, outputs = 4096, 14336
    assert (table[GATE].shape, table[GATE].tp_dim) == ((outputs, inputs), 0)
    first, second = run_ranks(boxes_on_meta, 2, LLAMA_3_1_8B)
    columns = [(start + 1, stop) for (start, stop), _ in (first[GATE][0], second[GATE][0])]
    assert columns == [(1, 7168), (7169, 14336)]
    # The matrix behind it takes the same 7168 numbers as inputs, so that nothing is sent between the two.
    assert (table[DOWN].shape, table[DOWN].tp_dim) == ((inputs, outputs), 1)
    assert [(start + 1, stop) for _, (start, stop) in (first[DOWN][0], second[DOWN][0])] == columns
    assert first[GATE][1] == second[GATE][1] == (7168, 4096)


@pytest.mark.parametrize("model", [ODD, LLAMA_3_1_8B], ids=["odd", "llama-3.1-8b"])
def test_every_weight_is_cut_as_the_table_says(model: ModelSpec) -> None:
    """As torch.chunk cuts: all parts but the last are equal."""
    ranks = run_ranks(boxes_on_meta, 2, model)
    for weight in weights_table(model):
        for rank, parts in enumerate(ranks):
            box, shape, is_whole = parts[weight.name]
            expected = [(0, size) for size in weight.shape]
            if weight.tp_dim is not None:
                size = weight.shape[weight.tp_dim]
                expected[weight.tp_dim] = (0, -(-size // 2)) if rank == 0 else (-(-size // 2), size)
            assert box == tuple(expected), weight.name
            assert shape == tuple(stop - start for start, stop in expected)
            assert is_whole == (weight.tp_dim is None)
    assert all(parts.keys() == {weight.name for weight in weights_table(model)} for parts in ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sequence_comes_together_and_apart_as_sums_say(ranks: int) -> None:
    assert run_ranks(gathered_and_scattered, ranks) == [None] * ranks


def gathered_and_scattered(rank: int, world: int) -> None:
    """Compare both collectives with the sums that every rank can make by itself, since it knows the others' numbers."""
    batch, length, width = 2, 4 * world, 3
    draw = torch.Generator().manual_seed(1)
    group = dist.group.WORLD
    assert group is not None
    mine = slice(rank * 4, (rank + 1) * 4)

    parts = torch.randn(world, batch, 4, width, generator=draw, dtype=torch.float64)
    incoming = torch.randn(world, batch, length, width, generator=draw, dtype=torch.float64)
    part = parts[rank].clone().requires_grad_()
    whole = gather_sequence(part, group)
    assert torch.equal(whole, torch.cat(list(parts), dim=1))
    whole.backward(incoming[rank])
    torch.testing.assert_close(part.grad, incoming.sum(0)[:, mine], rtol=1e-14, atol=1e-14)

    partials = torch.randn(world, batch, length, width, generator=draw, dtype=torch.float64)
    partial = partials[rank].clone().requires_grad_()
    scattered = scatter_sequence(partial, group)
    torch.testing.assert_close(scattered, partials.sum(0)[:, mine], rtol=1e-14, atol=1e-14)
    scattered.backward(parts[rank])
    assert torch.equal(partial.grad, torch.cat(list(parts), dim=1))


def test_the_cut_is_a_dtensor_over_tp_alone() -> None:
    """So that sharding over data axes, optimizer state and checkpoints need know nothing of it."""
    assert run_ranks(placements, 2) == [None, None]


def placements(rank: int, world: int) -> None:
    with torch.device("meta"):
        stage = Decoder(ODD)
    split_tensors(stage, build_mesh(Layout(tp=world), "cpu"))
    for weight in weights_table(ODD):
        parameter = stage.get_parameter(weight.name)
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh.mesh_dim_names == ("tp",)
        assert parameter.placements == ((Replicate(),) if weight.tp_dim is None else (Shard(weight.tp_dim),))
        assert tuple(parameter.shape) == weight.shape
