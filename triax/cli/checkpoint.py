"""Which states of a run are saved, which of them are whole, and which may go?"""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from triax.cli.files import write_json
from triax.errors import BadInput, TriaxError
from triax.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from triax.checkpoint.overview import Glance

checkpoint_app = typer.Typer(help="Look at saved states, check them, remove old ones.")

_Folder = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's folder, its checkpoints folder, or (to verify) one checkpoint.")
]
_Json = Annotated[
    str | None, typer.Option("--json", metavar="FILE|-", help="Write the same as JSON; - is standard output.")
]


@checkpoint_app.command("list")
def list_checkpoints(folder: _Folder, json_file: _Json = None) -> None:
    """Show the saved states of a run, newest first: step, size, age, layout, and whether they look whole.

    Contents are not read: that is what `verify` does.
    """
    from triax.checkpoint.overview import overview

    folder = _checkpoints_folder(folder)
    glances = overview(folder)
    rows = [
        {
            "name": one.name, "step": one.step, "bytes": one.bytes, "layout": one.layout, "run": one.run,
            "age_s": one.age_s, "is_whole": one.is_whole, "problem": one.problem,
        }
        for one in glances
    ]  # fmt: skip
    if _tell(rows, folder, json_file):
        return
    if not glances:
        print(f"no saved states in {folder}")
    for one in glances:
        age = "" if one.age_s is None else f"{format_seconds(one.age_s)} old"
        state = "whole" if one.is_whole else one.problem
        print(f"{one.name:<15}  {format_bytes(one.bytes):>10}  {age:>16}  {state}{_in(one.layout)}")


def _in(layout: str) -> str:
    return f", saved in {layout}" if layout else ""


@checkpoint_app.command()
def verify(folder: _Folder, json_file: _Json = None) -> None:
    """Check every byte of saved states against their checksums; exit code 1 where one is damaged.

    Every file that is not as it was written is named. A state that was not finished is no checkpoint, and no damage.
    """
    from triax.checkpoint.format import MANIFEST
    from triax.checkpoint.verify import find_checkpoints, verified

    folder = _checkpoints_folder(folder)
    is_one = os.path.lexists(folder / MANIFEST)
    states = [folder] if is_one else [found.folder for found in find_checkpoints(folder) if found.is_complete]
    if not states:
        raise BadInput(f"{folder} holds no saved state to verify: give a run's folder, such as runs/NAME.")
    rows: list[dict[str, Any]] = []
    for path in states:
        try:
            verified(path)
            problem = ""
        except BadInput as error:
            problem = str(error)
        rows.append({"name": path.name, "is_whole": not problem, "problem": problem})
        if json_file != "-":
            print(f"{path.name}: {problem or 'whole'}", flush=True)  # a large one takes minutes
    _tell(rows, folder, json_file)
    if damaged := sum(not row["is_whole"] for row in rows):
        raise TriaxError(f"{damaged} of {len(states)} saved states cannot be trusted.")


@checkpoint_app.command()
def prune(
    folder: _Folder,
    keep: Annotated[int, typer.Option(min=1, help="Newest whole states that stay.")] = 3,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    json_file: _Json = None,
) -> None:
    """Remove all but the newest saved states of a run, and what interrupted saves have left.

    The run is the one that wrote the newest state that looks whole. What another run or anybody else put into the
    folder stays, and is named.
    """
    from triax.checkpoint.overview import overview
    from triax.checkpoint.retain import outdated, remove, unfinished

    folder = _checkpoints_folder(folder)
    with _held(folder):
        glances = overview(folder)
        newest = next((one for one in glances if one.is_whole), None)
        if newest is None:
            raise BadInput(f"{folder} holds no whole state to keep: nothing is removed.")
        if newest.run is None:
            raise BadInput(f"{folder / newest.name} does not say which run wrote it: nothing is removed.")
        try:
            goes = [*outdated(folder, newest.run, keep, folder / newest.name), *unfinished(folder, newest.run)]
            sizes = {one.name: one.bytes for one in glances}
            for path in goes if not dry_run else ():
                remove(path)
        except OSError as error:
            where = error.filename or folder
            raise TriaxError(f"{where} could not be removed: {error.strerror or error}.") from None
    rows = [{"name": path.name, "bytes": sizes.get(path.name, 0), "is_removed": not dry_run} for path in goes]
    if not _tell(rows, folder, json_file):
        _say(rows, [one for one in glances if one.name not in {path.name for path in goes}], newest.run, dry_run)


def _say(rows: list[dict[str, Any]], stay: "list[Glance]", run: str, dry_run: bool) -> None:
    for row in rows:
        print(f"{row['name']}: {'would be removed' if dry_run else 'removed'}, {format_bytes(row['bytes'])}")
    for one in stay:
        why = "" if one.is_whole else f" ({one.problem})"
        print(f"{one.name}: stays{why}" + ("" if one.run == run else ", this run did not write it"))


def _tell(rows: list[dict[str, Any]], folder: Path, json_file: str | None) -> bool:
    """Write ``rows`` as JSON where that is wished; return whether standard output is taken by it."""
    if json_file is not None:
        write_json({"format_version": 1, "folder": str(folder), "checkpoints": rows}, json_file)
    return json_file == "-"


def _held(folder: Path) -> AbstractContextManager[None]:
    """Keep a run from starting in the folder while states are removed; raise BadInput where one is under way."""
    from triax.train.run_folder import RunFolder

    run = RunFolder(folder.parent)
    return run.locked() if folder == run.checkpoints and run.is_of_a_run() else nullcontext()


def _checkpoints_folder(folder: Path) -> Path:
    if not os.path.isdir(folder):
        raise BadInput(f"{folder} is no folder: give a run's folder, such as runs/NAME.")
    inside = folder / "checkpoints"
    return inside if os.path.isdir(inside) else folder
