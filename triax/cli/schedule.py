"""How is a pipeline schedule shown: as it is planned, or as a run has measured it?"""

from pathlib import Path
from typing import Annotated, Final

import typer

from triax.errors import BadInput

schedule_app = typer.Typer()

_MOST_DRAWN: Final = 1 << 16
"""Forwards in the picture of a schedule."""


@schedule_app.command()
def schedule(
    name: Annotated[str | None, typer.Argument(help="GPipe, 1F1B, Interleaved1F1B, ZBVZeroBubble, ...")] = None,
    pp: Annotated[int | None, typer.Option(min=1, max=256, help="Pipeline ranks.")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, max=4096, help="Microbatches of a step.")] = None,
    stages_per_rank: Annotated[int | None, typer.Option(min=1, max=64, help="Absent: 1 or 2, as the schedule.")] = None,
    run: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="A run's folder: show what it has measured.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=1, help="With --from; absent: the last that was timed.")] = None,
    rank: Annotated[int, typer.Option(min=0, help="With --from: show the pipeline that this rank belongs to.")] = 0,
) -> None:
    """Draw a pipeline schedule and its bubbles: a backward taking twice a forward, or --from a run as it was.

    A run times the steps that `watch.timeline_steps` names.
    """
    if run is not None:
        if name is not None or pp is not None or microbatches is not None or stages_per_rank is not None:
            raise BadInput("--from RUN shows the schedule of that run: leave out its name and sizes.")
        _show_measured(run, step, rank)
    elif name is None or pp is None or microbatches is None:
        raise BadInput("a schedule needs its name, --pp and --microbatches, or --from RUN to show what was measured.")
    else:
        _show_planned(name, pp, microbatches, stages_per_rank)


def _show_planned(name: str, pp: int, microbatches: int, stages_per_rank: int | None) -> None:
    from triax.spec.schedule import SCHEDULES, build, draw, legal, price

    if stages_per_rank is None:
        stages_per_rank = 1 if name not in SCHEDULES or not legal(name, pp, 1, microbatches) else 2
    forwards = pp * stages_per_rank * microbatches
    if forwards > _MOST_DRAWN:
        raise BadInput(
            f"a picture of {forwards:,} forwards is one that nobody reads: draw at most {_MOST_DRAWN:,}, which is pp x "
            f"stages per rank x microbatches."
        )
    table = build(name, pp, stages_per_rank, microbatches)
    timeline = price(table)
    print(draw(table, timeline))
    print(f"bubble: {timeline.mean_bubble_fraction:.1%} of the time of all ranks")


def _show_measured(run: Path, step: int | None, rank: int) -> None:
    from triax.spec.schedule import draw, price_as_measured, read_measured

    measured = read_measured(_file_of(run, step))
    layout = measured.layout
    if rank >= layout.world_size:
        raise BadInput(f"--rank {rank} is none of the {layout.world_size} ranks of {run}.")
    timeline = measured.timeline(rank)
    priced = price_as_measured(timeline, layout)
    idle = [measured.timeline(first).mean_bubble_fraction for first in measured.pipelines]
    print(f"step {measured.step} of {run}: {layout.describe()}")
    print(draw(timeline.table, timeline))
    print(
        f"bubble: {timeline.mean_bubble_fraction:.1%} measured, {priced.mean_bubble_fraction:.1%} of the schedule with "
        f"the mean times of these actions"
    )
    if len(idle) > 1:
        print(f"{len(idle)} pipelines side by side: {min(idle):.1%} to {max(idle):.1%} measured")


def _file_of(run: Path, step: int | None) -> Path:
    from triax.train.run_folder import RunFolder

    if not run.is_dir():
        raise BadInput(f"{run} is no folder: give a run's folder, such as runs/NAME.")
    steps = RunFolder(run).timed_steps()
    if not steps:
        raise BadInput(f"{run} has timed no step: set watch.timeline_steps = [10] in its run file to time step 10.")
    if step is not None and step not in steps:
        raise BadInput(f"{run} has not timed step {step}: use --step {' or '.join(map(str, steps[-5:]))}.")
    return RunFolder(run).timeline(steps[-1] if step is None else step)
