"""Do local_slices name the elements that a rank really holds, for every way in which torch places a tensor?"""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.checkpoint import toy_state
from tests.harness.ranks import run_ranks
from triax.checkpoint.state import _chunk, _ranges, _Split, local_slices
from triax.errors import BadInput


def check(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """The slices are what lies there in the whole, together all that this rank holds, and views of its memory."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    slices = local_slices(tensor)
    for piece in slices:
        lies_there = whole[tuple(slice(start, stop) for start, stop in piece.box)]
        assert torch.equal(toy_state.bits(piece.local), toy_state.bits(lies_there)), (tensor, piece.box)
    assert sum(piece.local.numel() for piece in slices) == local.numel()
    assert all(piece.local.untyped_storage().data_ptr() == local.untyped_storage().data_ptr() for piece in slices)


def test_what_fully_shard_places_alone_over_replicas_and_over_uneven_tensor_parallel() -> None:
    def each_layout(rank: int, world: int) -> int:
        num_tensors = 0
        for layout in toy_state.LAYOUTS[world]:
            for name, tensor in layout(rank, world).items():
                if name in toy_state.WEIGHTS:
                    dtype = toy_state.DTYPES_OF.get(name, torch.float32)
                    check(tensor, toy_state.whole(name, toy_state.WEIGHTS[name], dtype))
                    num_tensors += 1
        return num_tensors

    assert min(run_ranks(each_layout, 8)) > 25


def test_what_distribute_tensor_places() -> None:
    placements = [Replicate(), Shard(0), Shard(1), Shard(2)]
    interleaved = [(_StridedShard(0, split_factor=2),), (_StridedShard(1, split_factor=3),)]

    def each_placement(rank: int, world: int) -> None:
        flat, deep = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        for shape in ((9, 7, 5), (1, 2, 3), (3, 0, 2)):
            whole = torch.arange(torch.Size(shape).numel()).view(shape)
            for pair in itertools.product(placements, repeat=2):
                check(distribute_tensor(whole, deep, pair, src_data_rank=None), whole)
            for single in [*itertools.product(placements), *interleaved]:
                check(distribute_tensor(whole, flat, single, src_data_rank=None), whole)
        whole = torch.arange(24.0).view(12, 2)
        check(distribute_tensor(whole, deep, (_StridedShard(0, split_factor=2), Shard(0)), src_data_rank=None), whole)
        assert len(local_slices(distribute_tensor(torch.arange(16), flat, interleaved[0], src_data_rank=None))) == 2

    run_ranks(each_placement, 4)


@given(
    size=st.integers(0, 200),
    shards=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    strided=st.integers(1, 5),
    data=st.data(),
)
def test_nested_chunks_tile_the_dim(size: int, shards: list[int], strided: int, data: st.DataObject) -> None:
    """Over all places on the mesh, ranges follow one another from 0 to the size, and are the chunks of chunks."""
    factor = 1
    for degree in shards:
        factor *= degree
    held = []
    for places in itertools.product(*(range(degree) for degree in [*shards, strided])):
        splits = [_Split(strided, places[-1], factor)]
        splits += [_Split(degree, place, None) for degree, place in zip(shards, places[:-1], strict=True)]
        start, stop = 0, size
        for degree, place in zip([*shards, strided], places, strict=True):
            begin, end = _chunk(stop - start, degree, place)
            start, stop = start + begin, start + end
        ranges = _ranges(size, splits)
        assert ranges == ([(start, stop)] if size == 0 or stop > start else [])
        held += [] if size == 0 else ranges
    assert [start for start, _ in held] == [0, *(stop for _, stop in held[:-1])][: len(held)]
    assert size == 0 or held[-1][1] == size


def test_what_cannot_be_said_is_refused() -> None:
    def each_refusal(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(BadInput, match="does not say which of its elements"):
            local_slices(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
        lopsided = DTensor.from_local(
            torch.ones(1 + 2 * rank), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,)
        )
        with pytest.raises(BadInput, match=r"torch\.chunk"):
            local_slices(lopsided)
        dist.barrier()

    run_ranks(each_refusal, 2)
    with pytest.raises(BadInput, match="only plain dense tensors"):
        local_slices(torch.eye(3).to_sparse())
