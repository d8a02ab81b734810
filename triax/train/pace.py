"""Is a rank slower than its equals? Ranks share how long they were busy, and one of them tells.

What is shared is a few numbers for each rank and step, all of ten steps at once. Nothing waits for it but the host, and
that for no longer than for the step's own sums.
"""

from typing import Final

import numpy as np
import torch
import torch.distributed as dist

from triax.parallel.launch import Process
from triax.parallel.progress import Progress
from triax.parallel.waits import KINDS
from triax.spec.layout import Layout
from triax.train.reporter import Reporter
from triax.watch.record import server_name
from triax.watch.stragglers import Change, Stragglers

_SHARED_STEPS: Final = 10

_WORDS: Final = {"data": "reading data", "forward": "forward", "backward": "backward", "rest": "the rest of a step"}

_NAME_BYTES: Final = 64


class Pace:
    """Follows how long this rank is busy, and on the rank that tells, how long all are."""

    def __init__(self, layout: Layout, process: Process, progress: Progress, reporter: Reporter, limit: float) -> None:
        """``limit``: see ``Stragglers``; 0: nothing is shared. Ranks alone, and hosts that never wait for their cards'
        peers, have nothing to share."""
        self._is_shared = limit > 0 and process.world_size > 1 and process.device.type == "cpu"
        self._layout, self._process, self._reporter = layout, process, reporter
        self._clock = progress.clock
        self._busy_s: list[list[float]] = []
        self._servers: list[str] = []
        self._stragglers = Stragglers([equals(layout, rank) for rank in range(process.world_size)], limit)

    def begin(self) -> None:
        """Say that the tokens of a step are read now."""
        self._clock.start("data")

    def read(self) -> None:
        """Say that they are read, and the step follows."""
        self._clock.turn("rest")

    def end(self, step: int) -> None:
        """Say that this rank's work of ``step`` is done; all ranks call it together."""
        busy_s = self._clock.stop()
        if not self._is_shared:
            return
        self._busy_s.append(busy_s)
        if step % _SHARED_STEPS == 0:
            self._share(step)

    def _share(self, step: int) -> None:
        mine = torch.tensor(self._busy_s, dtype=torch.float64)
        self._busy_s = []
        of_all = _gathered(mine, self._process.world_size)
        if not self._servers:
            self._servers = _server_names(self._process.world_size)
        if not self._reporter.is_voice:
            return
        for change in self._stragglers.add(np.ascontiguousarray(of_all.transpose(0, 1).numpy())):
            self._tell(step, change)

    def _tell(self, step: int, change: Change) -> None:
        rank, kind = change.rank, KINDS[change.kind]
        who, server = self._layout.describe_rank(rank), self._servers[rank]
        above = f"{100 * change.above:.0f} %"
        if change.is_slow:
            self._reporter.warn(
                f"{who} on {server} is slow: busy for {above} longer in a step than ranks with equal work, most of it "
                f"in {_WORDS[kind]} (step {step})."
            )
        else:
            self._reporter.warn(f"{who} on {server} is as fast as ranks with equal work again (step {step}).")
        detail = {"above": round(change.above, 4), "phase": _WORDS[kind]}
        self._reporter.event_of(rank, server, "straggler" if change.is_slow else "straggler_over", step, detail)


def equals(layout: Layout, rank: int) -> tuple[int, int]:
    """Return what ranks that do equal work have in common with ``rank``: the pipeline rank and, where experts are
    spread out, which of them they hold."""
    return layout.coordinate(rank).pp, layout.expert_place(rank)[2] if layout.ep > 1 else 0


def _gathered(mine: torch.Tensor, world_size: int) -> torch.Tensor:
    parts = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(parts, mine)
    return torch.stack(parts)


def _server_names(world_size: int) -> list[str]:
    """Return the name of every rank's server; all ranks call this together."""
    name = server_name().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    names = _gathered(torch.frombuffer(bytearray(name), dtype=torch.uint8), world_size)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in names]
