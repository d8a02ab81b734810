"""Is this cluster fit to train on? Asked before a run is started, on the ranks that would train it."""

import os
from pathlib import Path
from typing import Annotated

import typer

from triax.errors import BadInput, TriaxError

doctor_app = typer.Typer()


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
    timeout_s: Annotated[float, typer.Option(min=1, max=3600, help="Longest wait of one rank for another.")] = 60.0,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write all that was found; - is standard output.")
    ] = None,
) -> None:
    """Look at every server before a run: versions, names, clocks, disk, limits, and the speed of its links.

    Each comes to one sentence: ok, warn or fail; exit code 1 where one fails. Starts local ranks; under torchrun, srun
    or mpirun it is one of theirs, on all servers.
    """
    from triax.launch.environment import torchrun_variables
    from triax.launch.rank import forget_leftovers, rank_of_process
    from triax.spec.load import load_cluster, load_run

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.update(torchrun_variables(os.environ))
    rank = rank_of_process(os.environ)
    if rank is not None and ranks is not None:
        raise BadInput(f"--ranks {ranks} starts processes, and this one was started as a rank: leave it out.")
    run = None if target is None else load_run(target)
    said = load_cluster(cluster) if cluster is not None else None if run is None else run.cluster
    folder = run_dir or Path("runs") / (target.stem if target is not None else "")
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is no folder: name one for the run with --run-dir.")
    if json_file not in (None, "-") and rank is None:
        _refuse_unwritable(Path(json_file or ""))
    num_ranks = 1
    if rank is None:
        from triax.cli.start import num_local_ranks
        from triax.launch.agent import alone, run_workers
        from triax.launch.workers import warm_up

        forget_leftovers(os.environ)
        num_ranks = num_local_ranks(said, ranks)
        if num_ranks > 1:
            warm_up("triax.verify.preflight_rank", num_ranks=num_ranks)
    from triax.verify.preflight_rank import Order, look_as_rank, work

    order = Order(
        run=None if run is None else run.model_dump_json(),
        cluster=None if said is None else said.model_dump_json(),
        folder=str(folder), json_file=json_file, timeout_s=timeout_s,
    )  # fmt: skip
    if num_ranks > 1:
        ended = run_workers(work, order, alone(num_ranks), shutdown_s=10)
        for number, how in ended.wordless.items():
            raise TriaxError(f"rank {number} {how} while the cluster was looked at.")
        raise typer.Exit(ended.code)
    raise typer.Exit(look_as_rank(order))


def _refuse_unwritable(path: Path) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise BadInput(f"{path} cannot be written: name a file in a folder that is there.")
