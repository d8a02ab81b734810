"""How do the times of a step come from all ranks into one file?"""

import torch
import torch.distributed as dist

from triax.parallel.launch import Process
from triax.parallel.progress import Progress
from triax.spec.layout import Layout
from triax.spec.schedule import MeasuredStep, RankTimes, executed_table, measured_as_text
from triax.train.run_folder import RunFolder, write_atomically


def save_timeline(progress: Progress, step: int, layout: Layout, process: Process, folder: RunFolder) -> None:
    """Write when every rank ran what since ``progress.time_actions``; all ranks call this together.

    Ranks of one server share a clock. Several servers do not, and each counts from the barrier before the step.
    """
    times = progress.take_times()
    origin_s = 0.0 if process.num_servers == 1 else times.origin_s
    rows = [tuple(map(str, row)) for row in executed_table(layout).rows]
    room = max(map(len, rows))
    mine = torch.zeros(2, room, dtype=torch.float64)
    for moments, kind in zip(mine, (times.start_s, times.end_s), strict=True):
        moments[: len(kind)] = torch.tensor(kind, dtype=torch.float64) - origin_s
    gathered = [torch.empty_like(mine) for _ in range(process.world_size)]
    dist.all_gather(gathered, mine)
    if process.rank != 0:
        return
    actions = [rows[layout.coordinate(rank).pp] for rank in range(layout.world_size)]
    first_s = min(float(moments[0, : len(row)].min()) for moments, row in zip(gathered, actions, strict=True))
    ranks = []
    for rank, (moments, row) in enumerate(zip(gathered, actions, strict=True)):
        start_s, end_s = ((kind[: len(row)] - first_s).tolist() for kind in moments)
        ranks.append(RankTimes(rank=rank, actions=row, start_s=tuple(start_s), end_s=tuple(end_s)))
    measured = MeasuredStep(step=step, layout=layout, ranks=tuple(ranks))
    write_atomically(folder.timeline(step), measured_as_text(measured))
