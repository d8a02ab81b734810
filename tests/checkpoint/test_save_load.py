"""Does a checkpoint of any layout load in any other, bit for bit, and say clearly when it does not fit?"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.checkpoint import toy_state
from tests.harness.ranks import run_ranks
from triax.checkpoint.format import Checkpoint
from triax.checkpoint.load import load
from triax.checkpoint.part import Part
from triax.checkpoint.save import CheckpointWriter
from triax.checkpoint.verify import find_checkpoints, newest_verified, read_checkpoint, verified
from triax.errors import BadInput

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved_on_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint of the same state from every layout of four ranks, each in a folder of its own."""
    folder = tmp_path_factory.mktemp("saved")

    def save_all(rank: int, world: int) -> None:
        for layout in toy_state.LAYOUTS[world]:
            writer = CheckpointWriter(folder / layout.__name__, run="toy")
            handle = writer.save(3, layout(rank, world), {"layout": layout.__name__, "tokens": 2**40}, wait=True)
            assert handle.outcome is not None
            assert handle.outcome.ok, handle.outcome.reason
            assert handle.outcome.reason == ""

    run_ranks(save_all, 4)
    return folder


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_any_layout_loads_in_any_other(saved_on_four_ranks: Path, world: int) -> None:
    def load_all(rank: int, world: int) -> int:
        num_loads = 0
        folders = sorted(saved_on_four_ranks.iterdir())
        for index, layout in enumerate(toy_state.LAYOUTS[world]):
            wanted = layout(rank, world)
            # On eight ranks every second pair: all folders and all layouts come up, in half the time.
            for folder in folders if world < 8 else folders[index % 2 :: 2]:
                checkpoint, passed_over = newest_verified(folder)
                assert checkpoint is not None
                assert passed_over == []
                assert checkpoint.manifest.step == 3
                assert checkpoint.manifest.extra == {"layout": folder.name, "tokens": 2**40}
                got = toy_state.blank(wanted)
                load(checkpoint, got)
                for name, tensor in wanted.items():
                    same = torch.equal(toy_state.bits(got[name]), toy_state.bits(tensor))
                    assert same, (folder.name, layout.__name__, name)
                num_loads += 1
        return num_loads

    assert min(run_ranks(load_all, world)) >= 7 * len(toy_state.LAYOUTS[world]) // 2


def test_every_element_is_written_once_and_any_safetensors_reader_reads_it(saved_on_four_ranks: Path) -> None:
    num_elements = sum(tensor.numel() for tensor in toy_state.replicated(0, 1).values())
    for folder in saved_on_four_ranks.iterdir():
        files = [load_file(path) for path in (folder / "step-00000003").glob("*.safetensors")]
        assert sum(tensor.numel() for file in files for tensor in file.values()) == num_elements, folder.name
        assert len(files) == 4


def test_the_folder_holds_what_the_format_says_and_no_more(saved_on_four_ranks: Path) -> None:
    folder = saved_on_four_ranks / "hybrid"
    assert json.loads((folder / "latest").read_text())["checkpoint"] == "step-00000003"
    names = sorted(path.name for path in (folder / "step-00000003").iterdir())
    shards = [f"shard-{rank:05d}-of-00004.safetensors" for rank in range(4)]
    assert names == ["manifest.json", *shards, "written-by.json"]
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000003"]


def saved(folder: Path, tensors: Tensors) -> Checkpoint:
    """A checkpoint of ``tensors`` by this process alone."""
    outcome = CheckpointWriter(folder, run="toy").save(1, tensors, {}, wait=True).outcome
    assert outcome is not None
    assert outcome.ok, outcome.reason
    return verified(folder / "step-00000001")


def test_state_changed_after_save_returned_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, run="toy")
    weight, extra = torch.arange(1 << 20), {"skipped": [1]}
    for step in (1, 2):
        assert writer.save(step, {"w": weight}, extra).outcome is None
        weight += 1
        extra["skipped"].append(step)
        outcome = writer.finish()
        assert outcome is not None
        assert outcome.ok
        assert outcome.step == step
        assert writer.poll() is None
        assert writer.finish() is None
        got = {"w": torch.zeros(1 << 20, dtype=torch.int64)}
        checkpoint = read_checkpoint(tmp_path / f"step-{step:08d}")
        load(checkpoint, got)
        assert torch.equal(got["w"], weight - 1)
        assert checkpoint.manifest.extra == {"skipped": [1, *range(1, step)]}


def test_a_state_copied_beside_a_step_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Part.copy

    def slowly(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.3)
        copy(*args, **kwargs)

    monkeypatch.setattr(Part, "copy", slowly)
    writer = CheckpointWriter(tmp_path, run="toy")
    weight = torch.arange(1 << 10)
    began_s = time.monotonic()
    assert writer.save(1, {"w": weight}, {}, beside=True).outcome is None
    assert time.monotonic() - began_s < 0.25
    writer.wait_until_copied()
    assert time.monotonic() - began_s > 0.25
    weight += 1
    outcome = writer.finish()
    assert outcome is not None
    assert outcome.ok
    assert outcome.stall_seconds > 0.2  # what the update waited for counts
    got = {"w": torch.zeros(1 << 10, dtype=torch.int64)}
    load(read_checkpoint(tmp_path / "step-00000001"), got)
    assert torch.equal(got["w"], weight - 1)


def test_poll_tells_once_and_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, run="toy")
    tensors = {"w": torch.randn(1 << 20)}
    writer.save(1, tensors, {})
    second = writer.save(2, tensors, {})
    assert second.previous is not None
    assert (second.previous.step, second.previous.ok) == (1, True)
    while (outcome := writer.poll()) is None:
        pass
    assert (outcome.step, outcome.ok) == (2, True)
    assert outcome.bytes > 4 << 20
    assert 0 < outcome.stall_seconds <= outcome.seconds
    assert writer.poll() is None


def test_tensors_that_change_between_saves_are_divided_anew(tmp_path: Path) -> None:
    def save_twice(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        writer = CheckpointWriter(tmp_path, run="toy")
        weight = torch.arange(7.0)
        first: Tensors = {"w": distribute_tensor(weight, mesh, [Shard(0)])}
        writer.save(1, first, {}, wait=True)
        # Only rank 1 has something new to say.
        second = first | ({"alone": torch.ones(2)} if rank == 1 else {})
        writer.save(2, second, {}, wait=True)
        checkpoint, _ = newest_verified(tmp_path)
        assert checkpoint is not None
        got: Tensors = {"w": distribute_tensor(torch.zeros(7), mesh, [Replicate()]), "alone": torch.zeros(2)}
        load(checkpoint, got)
        assert torch.equal(got["w"].to_local(), weight)
        assert got["alone"].tolist() == [1, 1]

    run_ranks(save_twice, 2)


def test_wider_floating_types_take_the_values_exactly(tmp_path: Path) -> None:
    values = {
        name: torch.randn(64, dtype=dtype)
        for name, dtype in (("b", torch.bfloat16), ("h", torch.float16), ("f", torch.float32))
    }
    checkpoint = saved(tmp_path, dict(values))
    for wider in ({"b": torch.float32, "h": torch.float32, "f": torch.float64}, dict.fromkeys("bhf", torch.float64)):
        got = {name: torch.zeros(64, dtype=dtype) for name, dtype in wider.items()}
        load(checkpoint, got)
        assert all(torch.equal(got[name], values[name].to(wider[name])) for name in wider)
    narrower = {"b": torch.zeros(64), "h": torch.zeros(64, dtype=torch.bfloat16), "f": torch.zeros(64).bfloat16()}
    with pytest.raises(BadInput, match=r"h is F16 in it and BF16 here; f is F32 in it and BF16 here"):
        load(checkpoint, narrower)
    assert narrower["b"].count_nonzero() == 0  # refused before anything was changed


def test_another_models_checkpoint_is_refused_with_everything_that_differs(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, {"a": torch.ones(2, 3), "b": torch.ones(4), "optimizer.step.a": torch.tensor(1.0)})
    untouched = {"a": torch.zeros(3, 2), "c": torch.zeros(1)}
    with pytest.raises(BadInput) as raised:
        load(checkpoint, untouched)
    for clause in ("a has shape (2, 3) in it and (3, 2) here", "c is not in it", "b is in it and not here"):
        assert clause in str(raised.value)
    weights = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    load(checkpoint, weights, unread=("optimizer.",))
    assert weights["a"].sum() == 6
    with pytest.raises(BadInput, match="b is in it and not here"):
        load(checkpoint, {"a": torch.zeros(2, 3)}, unread=("optimizer.",))


def test_many_differences_are_counted_and_not_all_printed(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, {f"w.{index}": torch.ones(1) for index in range(500)})
    with pytest.raises(BadInput, match="and 493 more") as raised:
        load(checkpoint, {"other": torch.zeros(1)})
    assert len(str(raised.value)) < 1000


def test_a_misfit_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    saved(tmp_path, {"w": torch.ones(4)})

    def misfit(rank: int, world: int) -> str:
        checkpoint, _ = newest_verified(tmp_path)
        assert checkpoint is not None
        with pytest.raises(BadInput) as raised:
            load(checkpoint, {"w": torch.ones(4 + rank)})
        return str(raised.value)

    first, second = run_ranks(misfit, 2)
    assert first == second
    assert "w has shape (4,) in it and (5,) here" in first


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (lambda rank, mesh: {"w": torch.ones(2 + rank)}, "different tensors by 'w'"),
        (lambda rank, mesh: {"w": torch.ones(2).to(torch.complex64)}, "complex64 cannot be stored"),
        (lambda rank, mesh: {"w@1": torch.ones(2)}, "cannot name a tensor"),
        (lambda rank, mesh: {"w": DTensor.from_local(torch.ones(2), mesh, [Partial()])} if rank else {}, "w cannot be"),
    ],
)
def test_tensors_that_cannot_be_said_are_refused_on_all_ranks(
    tmp_path: Path, tensors: Callable[..., Tensors], says: str
) -> None:
    def refused(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        writer = CheckpointWriter(tmp_path, run="toy")
        fine = {"fine": torch.ones(2)}
        for step in (1, 2):
            with pytest.raises(BadInput, match=says):
                writer.save(step, fine | tensors(rank, mesh), {})
            handle = writer.save(step, fine, {}, wait=True)
            assert handle.outcome is not None
            assert handle.outcome.ok

    run_ranks(refused, 2)


def test_an_empty_state_is_a_checkpoint_too(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, {})
    load(checkpoint, {})
    assert checkpoint.manifest.files == ()
    assert [found.is_complete for found in find_checkpoints(tmp_path)] == [True]
