"""The command line: each verb says what it does, imports what it needs, and turns trouble into one sentence."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from triax.cli.huggingface import huggingface_app
from triax.cli.schedule import schedule_app
from triax.cli.verify import verify_app
from triax.errors import BadInput, TriaxError

app = typer.Typer(
    name="triax",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train a language model split over many cards: the layout changes speed, memory and money, never the losses.",
)
checkpoint_app = typer.Typer(no_args_is_help=True, help="Look at saved states.")
data_app = typer.Typer(no_args_is_help=True, help="Look at what a run reads.")
config_app = typer.Typer(no_args_is_help=True, help="Look at what a run file says.")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(data_app, name="data")
app.add_typer(config_app, name="config")
app.add_typer(huggingface_app)
app.add_typer(schedule_app)
app.add_typer(verify_app)

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="A run file, or a plan.json where a verb takes one.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values that replace those of the file.")
]
LayoutOption = Annotated[
    str | None, typer.Option("--layout", metavar='"dp_shard=4 zero=3"', help="Short for layout.KEY=VALUE overrides.")
]


def main() -> None:
    """Run the command line and leave with its exit code: 0 done, 1 failed, 2 bad input, 3 stopped by the guard, 75
    stopped as asked and saved."""
    try:
        app()
    except TriaxError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"triax: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output went away (| head): nothing is wrong, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.command()
def train(
    target: RunFile,
    words: Overrides = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Local processes; absent: one for each card.")] = None,
    layout: LayoutOption = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run; absent: runs/NAME.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show warnings only.")] = False,
) -> None:
    """Train RUN.toml (or a plan.json), from its newest checkpoint where it has one.

    Starts one process for each rank; under torchrun it is the worker.
    """
    from triax.cli.start import start_training

    code = start_training(target, words or [], layout, num_ranks=ranks, run_dir=run_dir, quiet=quiet)
    if code:
        sys.stdout.flush()
        sys.exit(code)


@app.command()
def generate(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, a run's folder for its newest, or a Hugging Face one.")
    ],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among this many likeliest tokens; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Let a trained network write, in one process."""
    from triax.generate.checkpoint import open_writer
    from triax.generate.sample import Sampling

    writer = open_writer(checkpoint)
    for piece in writer.write(prompt, max_tokens, Sampling(temperature, top_k, seed)):
        print(piece, end="", flush=True)
    print()


@checkpoint_app.command("list")
def list_checkpoints(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or its checkpoints folder.")],
) -> None:
    """Show the saved states of a run, newest first."""
    from triax.checkpoint.verify import find_checkpoints, read_checkpoint
    from triax.units import format_bytes

    for found in find_checkpoints(_checkpoints_folder(folder)):
        if not found.is_complete:
            print(f"{found.folder.name}  not finished")
            continue
        try:
            manifest = read_checkpoint(found.folder).manifest
        except BadInput as error:
            print(f"{found.folder.name}  damaged: {error}")
            continue
        print(f"{found.folder.name}  {format_bytes(manifest.total_bytes)}  {len(manifest.tensors)} tensors")


@checkpoint_app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="A run's folder, its checkpoints folder, or one checkpoint.")],
) -> None:
    """Check every byte of saved states against their checksums; exit code 1 where one is damaged."""
    from triax.checkpoint.verify import find_checkpoints, verified

    folder = _checkpoints_folder(folder)
    one = [folder] if (folder / "manifest.json").exists() else []
    damaged = 0
    for path in one or [found.folder for found in find_checkpoints(folder) if found.is_complete]:
        try:
            verified(path)
            print(f"{path.name}: whole")
        except BadInput as error:
            damaged += 1
            print(f"{path.name}: {error}")
    if damaged:
        raise TriaxError(f"{damaged} of the saved states cannot be trusted.")


def _checkpoints_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise BadInput(f"{folder} is no folder: give a run's folder, such as runs/NAME.")
    return folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder


@data_app.command()
def prepare(target: RunFile, words: Overrides = None) -> None:
    """Turn a run's text into tokens now, so that training finds them ready."""
    from triax.cli.progress import preparing
    from triax.spec.load import load_run
    from triax.units import format_count

    tokens = preparing(load_run(target, words or []))
    index = tokens.index
    print(f"{format_count(index.num_tokens)} tokens, {format_count(index.num_documents)} documents in {tokens.folder}")


@config_app.command("show")
def show_config(target: RunFile, words: Overrides = None, layout: LayoutOption = None) -> None:
    """Print every value of a run, defaults included, and its fingerprint."""
    import tomli_w

    from triax.spec.load import layout_words, load_run
    from triax.train.run_folder import without_none

    run = load_run(target, [*(words or []), *layout_words(layout or "")])
    print(f"# fingerprint = {run.fingerprint}")
    print(tomli_w.dumps(without_none(run.model_dump(mode="json"))), end="")
