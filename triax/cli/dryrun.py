"""What would a rank of a cluster that is not here hold, send and compute? The verb ``dryrun``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triax.cli.files import write_json
from triax.cli.page import print_page
from triax.errors import BadInput

if TYPE_CHECKING:
    from triax.spec.cluster import Cluster
    from triax.spec.layout import Layout
    from triax.spec.run import Run

dryrun_app = typer.Typer()

_CARDS_PER_SERVER = 8
"""Cards of a server where only their number is said."""


@dryrun_app.command()
def dryrun(
    target: Annotated[Path, typer.Argument(metavar="RUN.toml|plan.json", help="A run file, or a plan.json.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values that replace those of the file."),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(metavar='"pp=8 tp=8"', help="Short for layout.KEY=VALUE overrides.")
    ] = None,
    rank: Annotated[int, typer.Option(help="Which rank to be.")] = 0,
    world: Annotated[int | None, typer.Option(min=1, help="Ranks, where the file names no cluster.")] = None,
    json_file: Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Everything as JSON.")] = None,
) -> None:
    """Take one step of RUN.toml as any rank of any layout, on this machine, without its cards: what the rank would hold
    and when, what it would send to whom, and what it would compute."""
    run, asked, cluster = _read(target, words or [], layout, world)
    from triax.verify.dryrun import dry_run
    from triax.verify.dryrun_page import as_json, page

    dry = dry_run(run, asked, cluster, rank)
    if json_file is not None:
        write_json(as_json(dry), json_file)
    if json_file != "-":
        print_page(page(dry))


def _read(target: Path, words: list[str], layout: str | None, world: int | None) -> "tuple[Run, Layout, Cluster]":
    """Return the run, the layout and the cluster that are meant, proved legal before anything slow is imported."""
    from triax.spec.check import require_legal
    from triax.spec.load import layout_words, load_plan, load_run
    from triax.spec.run import LayoutRequest

    overrides = [*words, *layout_words(layout or "")]
    if target.suffix == ".json":
        if overrides or world is not None:
            said = overrides[0] if overrides else f"--world {world}"
            raise BadInput(f"{target} is a plan and is taken as it is: give its run file to change {said}.")
        plan = load_plan(target)
        require_legal(plan.layout, plan.run, plan.cluster)
        return plan.run, plan.layout, plan.cluster
    run = load_run(target, overrides)
    cluster = _cluster(run, world)
    if run.layout == LayoutRequest():
        from triax.plan.answer import plan_for

        planned = plan_for(run, cluster)
        if planned is not None:
            return run, planned.layout, cluster
    from triax.spec.resolve import resolve_layout

    resolved = resolve_layout(run, cluster.num_cards)
    require_legal(resolved, run, cluster)
    return run, resolved, cluster


def _cluster(run: "Run", world: int | None) -> "Cluster":
    """Return the run's cluster, or one of ``world`` cards; without either, one of as many as the layout asks for."""
    from math import prod

    from triax.spec.cluster import Cluster
    from triax.spec.layout import AXES

    if run.cluster is not None and world in (None, run.cluster.num_cards):
        return run.cluster
    if run.cluster is not None:
        cards = min(run.cluster.cards_per_server, world or 1)
        device = run.cluster.device
    else:
        world = world or prod(getattr(run.layout, axis) or 1 for axis in AXES)
        cards, device = min(_CARDS_PER_SERVER, world), "cpu"
    assert world is not None
    if world % cards:
        raise BadInput(f"--world {world} is no whole number of servers of {cards} cards: use a multiple of {cards}.")
    servers = world // cards
    if run.cluster is None:
        return Cluster(servers=servers, cards_per_server=cards, device=device)
    return run.cluster.model_copy(update={"servers": servers, "cards_per_server": cards})
