"""How fast are the links between ranks, inside a server and across, by the collectives that training uses?

Across servers every rank sends bytes to the rank of the same number on a partner server, all ranks of a server at once,
so that what is measured is the server's uplink, whatever number of network cards it is made of. Servers take turns with
several partners: a slow one is slow with all of them.
"""

import json
import statistics
import time
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from triax.parallel.launch import Process
from triax.parallel.mesh import group_among

_PROBE_BYTES: Final = 1 << 18
_LEAST_S: Final = 0.5
"""What one measurement should take, so that its start, and what a switch lets through at once, hardly count."""
_MOST_BYTES: Final = 1 << 28
_PARTNERS: Final = 3
"""Other servers that each server is measured with."""
_MESSAGES: Final = 20


@dataclass(frozen=True, slots=True)
class Exchange:
    """What two servers sent each other, one way after the other."""

    servers: tuple[int, int]
    bytes_per_s: float
    """In the slower direction, of all ranks of a server together."""
    latency_s: float
    """Half of a round trip of eight bytes."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """What was measured; rates are bus rates, comparable with those of links (one direction)."""

    inside_bytes_per_s: tuple[float, ...]
    """All-reduce among the ranks of each server, all servers at once; empty where a server has one rank."""
    exchanges: tuple[Exchange, ...]
    all_bytes_per_s: float | None
    """All-reduce of all ranks; None where there is one."""
    across_bytes_per_s: float | None = None
    """All-reduce between all servers, of each server's ranks together; None where there is one server."""


def measure(process: Process, store: dist.Store) -> Speeds:
    """Measure all links; every rank of the process group calls this together, and all return the same."""
    inside = _inside(process, store)
    exchanges = _across(process, store)
    whole = _all_reduce_rate(process, None, process.world_size, None) if process.world_size > 1 else None
    between = _between(process, store)
    return Speeds(inside, exchanges, _least(store, process, "all", whole), between)


def rounds(num_servers: int, most: int = _PARTNERS) -> list[list[tuple[int, int]]]:
    """Return pairs of servers, round by round, so that each is in one pair at a time and meets ``most`` others.

    The circle of a round-robin tournament: one stands still and the others go round.
    """
    seats = [*range(num_servers), *([-1] if num_servers % 2 else [])]  # who meets -1 rests
    found = []
    for _ in range(min(len(seats) - 1, most + num_servers % 2)):
        pairs = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def _inside(process: Process, store: dist.Store) -> tuple[float, ...]:
    if process.local_world_size == 1:
        return ()
    inside = process.local_world_size
    mine = group_among(range(first, first + inside) for first in range(0, process.world_size, inside))
    rate = _all_reduce_rate(process, mine, inside, mine)
    said = share(store, process, "inside", rate)
    return tuple(min(said[server * inside : (server + 1) * inside]) for server in range(process.num_servers))


def _between(process: Process, store: dist.Store) -> float | None:
    """All-reduce among the ranks of the same number on all servers, all numbers at once: nothing crosses a server's
    uplink that it could sum up inside before."""
    if process.num_servers == 1:
        return None
    inside = process.local_world_size
    mine = group_among(range(local, process.world_size, inside) for local in range(inside))
    rate = _all_reduce_rate(process, mine, process.num_servers, beside=None)
    return _least(store, process, "between", inside * rate)


def _across(process: Process, store: dist.Store) -> tuple[Exchange, ...]:
    inside = process.local_world_size
    me = process.rank // inside
    found = []
    for number, pairs in enumerate(rounds(process.num_servers)):
        pair = next((pair for pair in pairs if me in pair), None)
        said: dict[str, float] | None = None
        if pair is not None:
            partner = pair[1] if me == pair[0] else pair[0]
            peer = partner * inside + process.local_rank
            said = _exchange(process, store, peer, f"{number}-{process.local_rank}-{pair[0]}")
        dist.barrier()
        everyone = share(store, process, f"across-{number}", said)
        for first, second in pairs:
            ranks = [everyone[server * inside : (server + 1) * inside] for server in (first, second)]
            ways = [sum(each["bytes"] for each in way) / max(each["seconds"] for each in way) for way in ranks]
            found.append(Exchange((first, second), min(ways), min(each["latency_s"] for each in ranks[0])))
    return tuple(found)


def _exchange(process: Process, store: dist.Store, peer: int, turn: str) -> dict[str, float]:
    """Send bytes to ``peer`` and get some, in turns, at a size that takes long enough to tell; return how ours went."""
    found = {
        "latency_s": statistics.median(_sent_s(process, peer, 8, process.rank < peer) for _ in range(_MESSAGES)) / 2
    }
    # One way after the other: gloo moves both ways of one pair at half the rate each.
    for sends in (process.rank < peer, process.rank > peer):
        key = f"doctor/size/{turn}/{process.rank if sends else peer}"
        probe_s = min(_sent_s(process, peer, _PROBE_BYTES, sends) for _ in range(2))
        if sends:
            store.set(key, str(_size_for(probe_s, _PROBE_BYTES)))
        num_bytes = int(store.get(key).decode())
        seconds = min(_sent_s(process, peer, num_bytes, sends) for _ in range(2))
        if sends:
            found |= {"bytes": float(num_bytes), "seconds": seconds}
    return found


def _sent_s(process: Process, peer: int, num_bytes: int, sends: bool) -> float:
    """Send ``num_bytes`` one way and eight back; return the seconds until those that sent know that all is there."""
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=process.device)
    back = torch.zeros(8, dtype=torch.uint8, device=process.device)
    _wait_for_device(process)
    began_s = time.perf_counter()
    if sends:
        dist.send(there, peer)
        dist.recv(back, peer)
    else:
        dist.recv(there, peer)
        dist.send(back, peer)
    _wait_for_device(process)
    return time.perf_counter() - began_s


def _all_reduce_rate(
    process: Process, group: dist.ProcessGroup | None, size: int, beside: dist.ProcessGroup | None
) -> float:
    """Return the bus rate of an all-reduce of ``size`` ranks: 2 (n - 1) / n of its bytes cross each rank's link.

    ``beside``: the group of all that measure at the same time, each in its ``group``; None: all ranks.
    """

    def seconds(num_bytes: int) -> float:
        ones = torch.zeros(num_bytes // 4, dtype=torch.float32, device=process.device)
        dist.barrier(beside)
        _wait_for_device(process)
        began_s = time.perf_counter()
        dist.all_reduce(ones, group=group)
        _wait_for_device(process)
        slowest = torch.tensor(time.perf_counter() - began_s, dtype=torch.float64, device=process.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=beside)
        return float(slowest)

    seconds(_PROBE_BYTES)
    num_bytes = _size_for(seconds(_PROBE_BYTES), _PROBE_BYTES) // 4 * 4
    return 2 * (size - 1) / size * num_bytes / min(seconds(num_bytes) for _ in range(2))


def _size_for(probe_s: float, probe_bytes: int) -> int:
    return int(min(max(probe_bytes * _LEAST_S / max(probe_s, 1e-6), probe_bytes), _MOST_BYTES))


def _wait_for_device(process: Process) -> None:
    if process.device.type == "cuda":
        torch.cuda.synchronize(process.device)


def _least(store: dist.Store, process: Process, what: str, value: float | None) -> float | None:
    said = [each for each in share(store, process, what, value) if each is not None]
    return min(said, default=None)


def share(store: dist.Store, process: Process, what: str, value: Any) -> list[Any]:
    """Return what all ranks say, by rank."""
    store.set(f"doctor/{what}/{process.rank}", json.dumps(value))
    return [
        json.loads(said) for said in store.multi_get([f"doctor/{what}/{rank}" for rank in range(process.world_size)])
    ]
