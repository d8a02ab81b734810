"""Is this cluster fit to train on? Asked before a run is started, on the ranks that would train it."""

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from triax.errors import BadInput, TriaxError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triax.cli.servers import Servers
    from triax.launch.agent import Place

doctor_app = typer.Typer()

_MEETING: Final = ".doctor"
"""Folder in that of the run, where servers find each other."""


@doctor_app.command("doctor")
def doctor(
    target: Annotated[
        Path | None, typer.Argument(metavar="[RUN.toml]", help="The run that the cluster should be fit for.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="What it should be like: 16x8xh100 or a .toml file; absent: what RUN.toml says."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Local processes; absent: one for each card.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run; absent: runs/NAME.")] = None,
    nnodes: Annotated[
        str | None, typer.Option(metavar="N", help="Servers; this command runs on each, with one run folder.")
    ] = None,
    server: Annotated[str | None, typer.Option(help="Name of this server; absent: its host name.")] = None,
    local_addr: Annotated[str | None, typer.Option(help="Address at which other servers reach this one.")] = None,
    timeout_s: Annotated[
        float, typer.Option(min=1, max=3600, help="Longest wait of one server or rank for another.")
    ] = 60.0,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write all that was found; - is standard output.")
    ] = None,
) -> None:
    """Look at every server before a run: versions, names, clocks, disk, limits, and the speed of its links.

    Each comes to one sentence: ok, warn or fail; exit code 1 where one fails. Starts local ranks; with --nnodes on
    each of several servers; under torchrun, srun or mpirun it is one of theirs, on all servers.
    """
    from triax.cli.servers import servers_said
    from triax.cli.start import num_local_ranks, refuse_of_a_rank
    from triax.launch.environment import torchrun_variables
    from triax.launch.rank import forget_leftovers, rank_of_process
    from triax.spec.load import load_cluster, load_run

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.update(torchrun_variables(os.environ))
    rank = rank_of_process(os.environ)
    if rank is not None:
        refuse_of_a_rank(ranks, is_on_each_server=nnodes is not None)
    servers = servers_said(nnodes, server, local_addr)
    run = None if target is None else load_run(target)
    said = load_cluster(cluster) if cluster is not None else None if run is None else run.cluster
    folder = run_dir or Path("runs") / (target.stem if target is not None else "")
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is no folder: name one for the run with --run-dir.")
    if json_file not in (None, "-") and rank is None:
        _refuse_unwritable(Path(json_file or ""))
    told: dict[str, Any] = {
        "run": None if run is None else run.model_dump_json(),
        "cluster": None if said is None else said.model_dump_json(),
        "folder": str(folder), "json_file": json_file, "timeout_s": timeout_s,
    }  # fmt: skip
    if rank is not None:
        from triax.verify.preflight_rank import Order, look_as_rank

        raise typer.Exit(look_as_rank(Order(**told)))
    forget_leftovers(os.environ)
    if servers is None:
        raise typer.Exit(_look_alone(num_local_ranks(said, ranks), told))
    inside = said.cards_per_server if said is not None else None
    raise typer.Exit(_look_with_others(servers, num_local_ranks(said, ranks or inside), told))


def _look_alone(num_ranks: int, told: dict[str, Any]) -> int:
    """Look with ranks of this server alone; return the exit code."""
    from triax.launch.agent import alone
    from triax.launch.workers import warm_up

    if num_ranks > 1:
        warm_up("triax.verify.preflight_rank", num_ranks=num_ranks)
        return _run(alone(num_ranks), told)
    from triax.verify.preflight_rank import Order, look_as_rank

    return look_as_rank(Order(**told))


def _look_with_others(servers: "Servers", num_ranks: int, told: dict[str, Any]) -> int:
    """Look as one of several servers, over the network that training would use; return the exit code."""
    from triax.launch.agent import Place, free_port
    from triax.launch.meeting import meeting
    from triax.launch.members import Beat
    from triax.launch.pulse import new_start
    from triax.launch.workers import warm_up

    try:
        port = free_port(servers.address)
    except TriaxError:
        raise BadInput(f"--local-addr {servers.address} is no address of this server.") from None
    os.environ |= servers.environment
    me = Beat(servers.name, new_start(), 0, servers.address, port, num_ranks)
    warm_up("triax.verify.preflight_rank", num_ranks=num_ranks)
    with _folder_made(Path(told["folder"])) as folder, meeting(folder, me, servers.most, told["timeout_s"]) as here:
        numbers = {beat.ranks for beat in here}
        if len(numbers) > 1:
            each = ", ".join(f"{beat.server} starts {beat.ranks}" for beat in here)
            raise BadInput(f"ranks must be equally many on each server, and {each}: say the same --ranks on all.")
        index = [beat.server for beat in here].index(servers.name)
        place = Place(index * num_ranks, num_ranks, len(here) * num_ranks, here[0].address, here[0].port)
        if index > 0:
            typer.echo(f"what is found is shown on server {here[0].server}")
        return _run(place, told)


@contextmanager
def _folder_made(folder: Path) -> "Iterator[Path]":
    """Make the folder of the run for the body of the ``with``; what of it was not there is removed again."""
    from triax.checkpoint.disk import make_folders, remove_empty

    try:
        made = make_folders(folder)
    except OSError as error:
        raise BadInput(
            f"{folder} cannot be made: {error.strerror or error}; give a folder for the run with --run-dir."
        ) from None
    try:
        yield folder / _MEETING
    finally:
        remove_empty(made)


def _run(place: "Place", told: dict[str, Any]) -> int:
    from triax.launch.agent import run_workers
    from triax.verify.preflight_rank import Order, work

    ended = run_workers(work, Order(**told), place, shutdown_s=10)
    for number, how in ended.wordless.items():
        raise TriaxError(f"rank {place.first_rank + number} {how} while the cluster was looked at.")
    return ended.code


def _refuse_unwritable(path: Path) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise BadInput(f"{path} cannot be written: name a file in a folder that is there.")
