"""How do ranks of this server come to be one group, and who may end them? Whoever started them, for a reason."""

import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from triax.errors import TriaxError
from triax.launch.workers import Ended, Order, Workers

_LOOK_S: Final = 0.1
"""How long what happens elsewhere may go unseen; the death of a worker is seen at once."""

_GRACE_S: Final = 2.0
"""For how long ranks whose peer has failed may say what they saw: they will train no more."""

_PORTS: Final = range(15000, 30000)
"""Where ranks meet: below the ports that a system hands out by itself, so that none is taken meanwhile."""

_TRIES: Final = 100

Watcher = Callable[[], float | None]
"""Says within how many seconds the ranks must have stopped, or None: they may go on. Asked ten times a second."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks of one server stand among all, and where all of them meet."""

    first_rank: int
    local_ranks: int
    world_size: int
    master_addr: str
    master_port: int

    def environments(self) -> list[dict[str, str]]:
        """Return torchrun's variables for each local rank."""
        return [
            {
                "RANK": str(self.first_rank + local), "WORLD_SIZE": str(self.world_size),
                "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(self.local_ranks),
                "MASTER_ADDR": self.master_addr, "MASTER_PORT": str(self.master_port),
            }
            for local in range(self.local_ranks)
        ]  # fmt: skip


def alone(num_ranks: int) -> Place:
    """Return the place of ranks of this server alone. They meet at a port that no earlier attempt has used, so that
    nothing of one can be taken for an answer."""
    return Place(0, num_ranks, num_ranks, "127.0.0.1", free_port("127.0.0.1"))


def run_workers(
    work: Callable[[Order], None], order: Order, place: Place, shutdown_s: float, *watchers: Watcher
) -> Ended:
    """Run ``work(order)`` as the ranks of ``place`` until they end, all together: where one fails, its peers are
    stopped at once. Return how they ended.

    They stop within the time that one of ``watchers`` says, and within ``shutdown_s`` where this process dies.
    """
    workers = Workers(work, order, place.environments(), shutdown_s)
    try:
        return follow(workers, *watchers)
    finally:
        workers.kill()


def follow(workers: Workers, *watchers: Watcher) -> Ended:
    """Wait for the end of all ``workers``; return how they ended."""
    while workers.running:
        workers.wait(_LOOK_S)
        if workers.has_failed:
            workers.stop(_GRACE_S)
        for within_s in (watcher() for watcher in watchers):
            if within_s is not None:
                workers.stop(within_s)
    return workers.ended()


def free_port(address: str) -> int:
    """Return a port at which nobody listens on ``address`` of this server."""
    for port in _random_ports():
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                continue
        return port
    raise TriaxError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free at {address}: ranks could not meet.")


def _random_ports() -> Iterator[int]:
    dice = random.SystemRandom()
    return (dice.choice(_PORTS) for _ in range(_TRIES))
