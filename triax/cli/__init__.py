"""The command line: each verb says what it does, imports what it needs, and turns trouble into one sentence."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
import typer.main

from triax.cli.checkpoint import checkpoint_app
from triax.cli.data import data_app
from triax.cli.doctor import doctor_app
from triax.cli.dryrun import dryrun_app
from triax.cli.huggingface import huggingface_app
from triax.cli.plan import plan_app
from triax.cli.schedule import schedule_app
from triax.cli.tokenizer import tokenizer_app
from triax.cli.verify import verify_app
from triax.errors import BadInput, Interrupted, TriaxError

app = typer.Typer(
    name="triax",
    add_completion=False,
    rich_markup_mode=None,  # the same help for a person and a pipe, in half the time
    context_settings={"max_content_width": 120},
    help="Train a language model split over many cards: the layout changes speed, memory and money, never the losses.",
)
config_app = typer.Typer(help="Look at what a run file says.")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(config_app, name="config")
app.add_typer(doctor_app)
app.add_typer(dryrun_app)
app.add_typer(huggingface_app)
app.add_typer(plan_app)
app.add_typer(schedule_app)
app.add_typer(verify_app)

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="A run file, or a plan.json where a verb takes one.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values that replace those of the file.")
]
LayoutOption = Annotated[
    str | None, typer.Option("--layout", metavar='"dp_shard=4 zero=3"', help="Short for layout.KEY=VALUE overrides.")
]


def run(words: Sequence[str]) -> int:
    """Run a command line; return its exit code: 0 done, 1 failed, 2 bad input, 3 stopped by the guard, 75 stopped as
    asked and saved, 130 interrupted where there was nothing to save.

    What a user should know of a failure is one sentence on standard error.
    """
    from triax.train.message import be_silent, tell, write_anything
    from triax.train.stop import raised_by_signals

    write_anything()
    is_deaf = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as in the background of a shell
    try:
        with raised_by_signals(Interrupted("interrupted."), () if is_deaf else (signal.SIGINT,)):
            code = _invoke(words)
        sys.stdout.flush()
        return code
    except TriaxError as error:
        if _speaks():
            tell(str(error))
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output went away (| head): nothing is wrong, and nothing more can be said.
        be_silent()
        return 0
    except OSError as error:
        # Of the machine, and not foreseen: a full disk behind standard output, too many open files, ...
        be_silent()
        tell(f"{error.filename or 'the system says'}: {error.strerror or error}.")
        return 1


def _invoke(words: Sequence[str]) -> int:
    """Run the verb that ``words`` say; raise BadInput where they say none, or not as it wants them."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("triax", list(words) or ["--help"]) as call:
            command.invoke(call)
    except typer.Exit as left:
        return left.exit_code
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        path = "triax" if context is None else context.command_path
        raise BadInput(f"{error.format_message().rstrip('.')}; `{path} --help` says what there is.") from None
    return 0


def _speaks() -> bool:
    """Return whether this process tells what went wrong: of the ranks of a server the first does, for all of them."""
    from triax.launch.rank import rank_of_process

    try:
        rank = rank_of_process(os.environ)
    except BadInput:
        return True
    return rank is None or rank.local_rank == 0


@app.command()
def train(
    target: RunFile,
    words: Overrides = None,
    ranks: Annotated[int | None, typer.Option(help="Local processes; absent: one for each card.")] = None,
    layout: LayoutOption = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run; absent: runs/NAME.")] = None,
    max_restarts: Annotated[
        int | None, typer.Option(min=0, help="Restarts in a row that may gain no checkpoint; 0: none at all.")
    ] = None,
    nnodes: Annotated[
        str | None, typer.Option(metavar="MIN:MAX", help="Servers; this command runs on each, with one run folder.")
    ] = None,
    server: Annotated[str | None, typer.Option(help="Name of this server; absent: its host name.")] = None,
    local_addr: Annotated[str | None, typer.Option(help="Address at which other servers reach this one.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show warnings only.")] = False,
) -> None:
    """Train RUN.toml (or a plan.json), from its newest checkpoint where it has one.

    Starts one process for each rank; under torchrun it is the worker.
    """
    from triax.cli.servers import servers_said
    from triax.cli.start import start_training

    servers = servers_said(nnodes, server, local_addr)
    code = start_training(
        target, words or [], layout, num_ranks=ranks, run_dir=run_dir, quiet=quiet, max_restarts=max_restarts,
        servers=servers,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def generate(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, a run's folder for its newest, or a Hugging Face one.")
    ],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among this many likeliest tokens; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Another one, another text.")] = 0,
) -> None:
    """Let a trained network write, in one process."""
    from triax.generate.checkpoint import open_writer
    from triax.generate.sample import Sampling

    writer = open_writer(checkpoint)
    is_terminal = sys.stdout.isatty()
    for piece in writer.write(prompt, max_tokens, Sampling(temperature, top_k, seed)):
        print(_harmless(piece) if is_terminal else piece, end="", flush=True)
    print()


def _harmless(text: str) -> str:
    """Return ``text`` without what would steer a terminal: a network may write any byte."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)


@config_app.command("show")
def show_config(target: RunFile, words: Overrides = None, layout: LayoutOption = None) -> None:
    """Print every value of a run, defaults included, and its fingerprint."""
    import tomli_w

    from triax.spec.load import layout_words, load_run
    from triax.spec.model_source import as_run_file
    from triax.train.run_folder import without_none

    run = load_run(target, [*(words or []), *layout_words(layout or "")])
    print(f"# fingerprint = {run.fingerprint}")
    print(tomli_w.dumps(without_none(as_run_file(run.model_dump(mode="json")))), end="")
