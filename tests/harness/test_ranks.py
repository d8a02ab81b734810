"""Does the harness return what ranks return, show why they fail, and leave nothing running?"""

import dataclasses
import gc
import os
import subprocess
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import RanksFailed, run_ranks


@dataclasses.dataclass(frozen=True)
class Report:
    loss: float
    norms: dict[str, torch.Tensor]


def test_results_come_in_rank_order() -> None:
    def sum_of_ranks(rank: int, world: int, offset: int) -> tuple[int, torch.Tensor]:
        total = torch.tensor([float(rank + offset)], dtype=torch.float64)
        dist.all_reduce(total)
        return rank, total

    results = run_ranks(sum_of_ranks, 4, 10)
    assert [rank for rank, _ in results] == [0, 1, 2, 3]
    assert all(torch.equal(total, torch.tensor([46.0], dtype=torch.float64)) for _, total in results)


def test_results_keep_type_and_bits() -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    sent = {
        "plain": [None, True, 7, "text", b"\x00\xff", {1, 2}],
        ("a", 1): (0.1 + 0.2, float("inf"), float("nan")),
        "views that share memory": [shared, shared.T, shared[:, 1:]],
        "dtypes": [torch.full((2,), 1 / 3, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)],
        "no elements, no dims": [torch.empty(0, 3), torch.tensor(5), torch.ones(2, requires_grad=True)],
        "numpy": [np.arange(3, dtype=np.int32), np.float32(0.5)],
        "dataclass": Report(2.5, {"w": torch.ones(2)}),
    }
    (got,) = run_ranks(lambda rank, world: sent, 1)
    assert got.keys() == sent.keys()
    assert got["plain"] == sent["plain"]
    assert repr(got["a", 1]) == repr(sent["a", 1])
    for key in ("views that share memory", "dtypes", "no elements, no dims"):
        assert [tensor.dtype for tensor in got[key]] == [tensor.dtype for tensor in sent[key]]
        assert all(torch.equal(a, b) for a, b in zip(got[key], sent[key], strict=True))
    assert got["numpy"][0].dtype == np.int32
    assert got["numpy"][0].tolist() == [0, 1, 2]
    assert got["numpy"][1] == 0.5
    assert isinstance(got["dataclass"], Report)
    assert got["dataclass"].norms["w"].tolist() == [1, 1]


def test_ranks_know_their_place_and_leave_the_parent_alone() -> None:
    before = dict(os.environ)

    def place(rank: int, world: int) -> tuple[list[str], int]:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TRIAX_TEST")
        return [os.environ[name] for name in names], torch.get_num_threads()

    assert run_ranks(place, 2, env={"TRIAX_TEST": "yes"}) == [
        (["0", "0", "2", "2", "yes"], 1),
        (["1", "1", "2", "2", "yes"], 1),
    ]
    assert dict(os.environ) == before
    assert not dist.is_initialized()


def test_same_draws_on_every_rank_and_in_every_run() -> None:
    def draw(rank: int, world: int) -> list[float]:
        return torch.rand(2).tolist()

    torch.manual_seed(1)
    assert len({tuple(drawn) for drawn in run_ranks(draw, 2) + run_ranks(draw, 1)}) == 1


def test_failing_rank_is_the_one_shown() -> None:
    def fail_on_rank_1(rank: int, world: int) -> None:
        if rank == 1:
            raise ValueError("the cause")
        dist.all_reduce(torch.ones(1))

    began_s = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail_on_rank_1, 3)
    assert time.monotonic() - began_s < 15
    assert caught.value.failures[0].rank == 1
    message = str(caught.value)
    assert message.startswith("rank 1 raised ValueError: the cause\n")
    assert "in fail_on_rank_1" in message
    assert "in _be_rank" not in message


def test_results_of_ranks_that_finished_are_kept() -> None:
    def fail_after_the_last_collective(rank: int, world: int) -> int:
        if rank == 0:
            return 7
        os._exit(0)

    with pytest.raises(RanksFailed, match="rank 1 left with exit code 0 and without a result") as caught:
        run_ranks(fail_after_the_last_collective, 2)
    # Rank 0 saw its peer go while it waited for it to finish, so it has no result either: it cannot know it is whole.
    assert {failure.rank for failure in caught.value.failures} | set(caught.value.results) == {0, 1}


def test_hanging_rank_is_ended_and_its_place_shown() -> None:
    def stand_still(rank: int, world: int, pids: torch.Tensor) -> None:
        pids[rank] = os.getpid()
        while rank == 1:
            time.sleep(0.1)
        dist.all_reduce(torch.ones(1))

    pids = torch.zeros(2, dtype=torch.int64).share_memory_()
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        began_s = time.monotonic()
        with pytest.raises(RanksFailed) as caught:
            run_ranks(stand_still, 2, pids, timeout_s=2)
        assert time.monotonic() - began_s < 10
        assert caught.value.failures[0].rank == 1
        assert "was still running" in caught.value.failures[0].summary
        assert "in stand_still" in caught.value.failures[0].detail
        for pid in pids.tolist():
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_aborting_rank_is_named_by_its_signal_and_place() -> None:
    def abort_on_rank_1(rank: int, world: int) -> None:
        if rank == 1:
            threading.Thread(target=os.abort).start()  # gloo, too, aborts outside the thread that called it
        dist.all_reduce(torch.ones(1))
        time.sleep(10)

    with pytest.raises(RanksFailed) as caught:
        run_ranks(abort_on_rank_1, 2)
    assert str(caught.value).startswith("rank 1 died by SIGABRT and without a result\n")
    assert "in abort_on_rank_1" in caught.value.failures[0].detail


def test_what_cannot_be_returned_is_named() -> None:
    def return_an_open_file(rank: int, world: int) -> dict[str, object]:
        return {"file": open(os.devnull)}

    with pytest.raises(RanksFailed, match=r"result\['file'\] is a TextIOWrapper, which a rank cannot return"):
        run_ranks(return_an_open_file, 1)


def test_rubbish_of_this_process_is_not_collected_in_a_rank() -> None:
    """A group that has ended here has threads which a fork does not take along: a rank would wait for them forever."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    cycle: list[object] = [dist.group.WORLD]
    cycle.append(cycle)
    dist.destroy_process_group()
    gc.disable()
    try:
        del cycle
        assert run_ranks(lambda rank, world: gc.collect() >= 0, 1, timeout_s=20) == [True]
    finally:
        gc.enable()
