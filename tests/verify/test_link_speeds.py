"""Does every server take turns with several others, in one pair at a time?"""

import os
from collections import Counter

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.ranks import run_ranks
from triax.parallel.launch import process_from_environment
from triax.verify import link_speeds
from triax.verify.link_speeds import Speeds, measure, rounds


@given(st.integers(1, 200))
def test_each_server_meets_three_others_one_at_a_time(num_servers: int) -> None:
    met: Counter[int] = Counter()
    seen = set()
    for pairs in rounds(num_servers):
        servers = [server for pair in pairs for server in pair]
        assert len(set(servers)) == len(servers)
        assert len(servers) >= num_servers - 1
        met.update(servers)
        assert not seen & set(pairs)
        seen |= set(pairs)
    assert all(met[server] >= min(3, num_servers - 1) for server in range(num_servers))


@pytest.mark.parametrize(("world", "inside", "num_exchanges"), [(2, 2, 0), (2, 1, 1), (4, 2, 1)])
def test_all_ranks_return_the_same_speeds(
    monkeypatch: pytest.MonkeyPatch, world: int, inside: int, num_exchanges: int
) -> None:
    monkeypatch.setattr(link_speeds, "_LEAST_S", 0.02)  # ranks are forks

    def body(rank: int, _world: int) -> str:
        os.environ.update(LOCAL_WORLD_SIZE=str(inside), LOCAL_RANK=str(rank % inside))
        store = dist.distributed_c10d._get_default_store()
        speeds = measure(process_from_environment(), store)
        assert isinstance(speeds, Speeds)
        assert speeds.all_bytes_per_s is not None
        rates = [*speeds.inside_bytes_per_s, *(each.bytes_per_s for each in speeds.exchanges), speeds.all_bytes_per_s]
        assert all(rate > 1e6 for rate in rates)
        assert len(speeds.inside_bytes_per_s) == (world // inside if inside > 1 else 0)
        assert [each.servers for each in speeds.exchanges] == [(0, 1)] * num_exchanges
        return repr(speeds)

    assert len(set(run_ranks(body, world))) == 1
