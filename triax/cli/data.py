"""What does a run read? Prepares it, and shows samples as the network sees them."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triax.errors import BadInput
from triax.units import format_count

if TYPE_CHECKING:
    from triax.data.corpus import Corpus
    from triax.data.store import TokenStore

data_app = typer.Typer(help="Look at what a run reads.")

_RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="A run file.")]
_Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values that replace those of the file.")
]


@data_app.command()
def prepare(
    target: _RunFile,
    words: _Overrides = None,
    megatron: Annotated[
        Path | None,
        typer.Option(metavar="PREFIX", help="Write Megatron's PREFIX.bin and .idx, too; PREFIX-NAME for each source."),
    ] = None,
    processes: Annotated[int | None, typer.Option(help="Processes that tokenise; absent: one for each core.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Turn a run's text into tokens now, so that training finds them ready.

    What is finished is kept when this is interrupted: start it again and it goes on.
    """
    from triax.cli.progress import preparing
    from triax.spec.load import load_run

    if processes is not None and processes < 1:
        raise BadInput(f"--processes {processes} cannot be: use 1 or more.")
    corpus = preparing(load_run(target, words or []), quiet=quiet, num_processes=processes)
    for source in corpus.sources:
        num_documents = sum(store.index.num_documents for store in source.stores)
        documents = "1 document" if num_documents == 1 else f"{format_count(num_documents)} documents"
        share = "" if len(corpus.sources) == 1 else f"{source.name}, {float(source.weight):.4g} of the samples: "
        folder = f" in {source.stores[0].folder}" if len(source.stores) == 1 else f" in {len(source.stores)} files"
        print(f"{share}{format_count(source.num_tokens)} tokens, {documents}{folder}")
    if megatron is not None:
        _write_megatron(corpus, megatron, quiet=quiet)


def _write_megatron(corpus: "Corpus", prefix: Path, *, quiet: bool) -> None:
    from triax.cli.progress import bar_of_bytes
    from triax.data.megatron import write_megatron

    for store, its_prefix in _megatron_prefixes(corpus, prefix):
        with bar_of_bytes(f"tokens of {its_prefix.name}.bin", quiet=quiet) as progress:
            write_megatron(store, its_prefix, progress)
        print(f"{its_prefix}.bin and {its_prefix}.idx")


def _megatron_prefixes(corpus: "Corpus", prefix: Path) -> Iterator[tuple["TokenStore", Path]]:
    """Yield each store with the prefix of its files: that of the command, where there is one store only."""
    for source in corpus.sources:
        for number, store in enumerate(source.stores):
            name = prefix.name if len(corpus.sources) == 1 else f"{prefix.name}-{source.name}"
            yield store, prefix.with_name(name if len(source.stores) == 1 else f"{name}-{number}")


@data_app.command()
def show(
    target: _RunFile,
    words: _Overrides = None,
    sample: Annotated[int, typer.Option(help="Number of the first sample, counted from the start of the run.")] = 0,
    count: Annotated[int, typer.Option(help="How many samples.")] = 1,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Held-out samples in place of those of training.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Show samples as text, with the ends of documents and the tokens that nothing predicts."""
    import numpy as np

    from triax.cli.progress import preparing
    from triax.cli.samples import print_samples
    from triax.data.batch import batches_of
    from triax.data.tokenizer import load_tokenizer
    from triax.spec.load import load_run

    if sample < 0 or count < 1:
        raise BadInput(
            f"--sample {sample} --count {count} are no samples: numbers start at 0, and 1 is the least count."
        )
    run = load_run(target, words or [])
    if held_out and sample + count > run.eval.sequences:
        raise BadInput(f"--held-out --sample {sample} --count {count}: the run holds out {run.eval.sequences} samples.")
    batches = batches_of(
        preparing(run, quiet=quiet), seq_len=run.data.seq_len,
        attend_across_documents=run.data.attend_across_documents, eval_sequences=run.eval.sequences,
        seed=run.train.seed,
    )  # fmt: skip
    tokenizer = load_tokenizer(run.data.tokenizer)
    numbers = np.arange(sample, sample + count)
    sequences = batches.order.held_out(numbers) if held_out else batches.order.train(numbers)[1]
    print_samples(batches, tokenizer, numbers.tolist(), sequences.tolist(), "held-out sample" if held_out else "sample")
