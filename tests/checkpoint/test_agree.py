"""Do ranks hear what the others said, whatever its length, and with any group?"""

import torch.distributed as dist

from tests.harness.ranks import run_ranks
from triax.checkpoint.agree import Ranks


def test_values_travel_between_ranks() -> None:
    def talk(rank: int, world: int) -> list[object]:
        ranks = Ranks.of(None)
        said = {"rank": rank, "text": "é" * 5000 * rank, "nothing": None}
        gathered = ranks.gather(said)
        if rank == 0:
            assert gathered == [{"rank": r, "text": "é" * 5000 * r, "nothing": None} for r in range(world)]
        else:
            assert gathered is None
        assert ranks.scatter([[r] * 100 * r for r in range(world)] if rank == 0 else None) == [rank] * 100 * rank
        assert ranks.broadcast({"from": rank}) == {"from": 0}
        assert ranks.maxima(rank, -rank, 7) == (world - 1, 0, 7)
        assert ranks.union([]) == []
        return [ranks.union(["same", f"only {rank}"] if rank else [])]

    assert run_ranks(talk, 3) == [[["same", "only 1", "only 2"]]] * 3


def test_a_group_of_some_ranks_has_its_own_first_rank() -> None:
    def talk(rank: int, world: int) -> object:
        group = dist.new_group([1, 2])
        if rank == 0:
            return None
        ranks = Ranks.of(group)
        assert (ranks.rank, ranks.size) == (rank - 1, 2)
        assert ranks.gather(rank) == ([1, 2] if rank == 1 else None)
        return [ranks.broadcast(f"rank {rank}"), ranks.scatter(["a", "b"] if rank == 1 else None)]

    assert run_ranks(talk, 3) == [None, ["rank 1", "a"], ["rank 1", "b"]]


def test_one_process_alone_agrees_with_itself() -> None:
    ranks = Ranks.of(None)
    assert (ranks.rank, ranks.size) == (0, 1)
    assert ranks.gather("a") == ["a"]
    assert ranks.scatter(["a"]) == "a"
    assert ranks.broadcast("a") == "a"
    assert ranks.maxima(3, -1) == (3, -1)
    assert ranks.union(["b"]) == ["b"]
