"""How does a person make a tokenizer from files of text?"""

from pathlib import Path
from typing import Annotated

import typer

tokenizer_app = typer.Typer(help="Make a tokenizer.")


@tokenizer_app.callback()
def _only_verbs() -> None:
    """Keep the verb in the command line although there is one only."""


@tokenizer_app.command("train")
def train_on_files(
    files: Annotated[list[str], typer.Argument(metavar="FILES...", help="Files, folders or patterns of text.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder to make.")],
    vocab_size: Annotated[int, typer.Option(help="Entries of the vocabulary.")] = 32_000,
    eos: Annotated[str, typer.Option(help="The token that ends a document.")] = "<|endoftext|>",
    file_format: Annotated[str, typer.Option("--format", help="As data.format; auto goes by endings.")] = "auto",
    extensions: Annotated[
        list[str] | None, typer.Option("--extension", help="Endings to take from folders, such as .py.")
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Train a byte-level BPE on FILES and write tokenizer.json and tokenizer_config.json into DIR."""
    from triax.cli.progress import bar_of_bytes
    from triax.data.files import find_files
    from triax.data.train_tokenizer import train_tokenizer
    from triax.spec.data import SourceSpec
    from triax.spec.faults import validated

    said = {
        "train": tuple(files), "weight": 1.0, "format": file_format, "extensions": tuple(extensions or ()),
        "text_field": text_field,
    }  # fmt: skip
    source = validated(SourceSpec, said, "triax tokenizer train")
    found = find_files(source.train, file_format=source.format or "auto", extensions=source.extensions or ())
    with bar_of_bytes("text read", quiet=quiet) as progress:
        made = train_tokenizer(
            found, output, vocab_size=vocab_size, eos_token=eos, text_field=text_field, progress=progress
        )
    short = "" if made.vocab_size == vocab_size else f" ({vocab_size:,} were asked for, and the text has no more pairs)"
    print(f"{made.vocab_size:,} tokens{short}, documents end with {eos} (id {made.eos_id}), in {output}")
