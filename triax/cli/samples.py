"""How does a sample look: its text, where documents end, and which tokens nothing predicts?"""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from triax.data.batch import Batches
    from triax.data.packing import TokenSequence
    from triax.data.tokenizer import Tokenizer

_END = "■"
_CUT = "─" * 20

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters of a corpus that would move a terminal's cursor or change its colours."""


def print_samples(
    batches: "Batches", tokenizer: "Tokenizer", numbers: Sequence[int], sequences: Sequence[int], what: str
) -> None:
    """Print samples with their ``numbers``: the text of ``sequences``. ``what`` they are is said in front."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(_legend(is_terminal=console.is_terminal))
    for number, sequence in zip(numbers, sequences, strict=True):
        console.print(Text(f"\n{what} {number:,}: {_described(batches, sequence)}", style="bold"))
        console.print(rendered(batches.sequences[sequence], tokenizer, is_terminal=console.is_terminal))


def _legend(*, is_terminal: bool) -> Text:
    unpredicted = _marked("tokens that nothing predicts", False, is_terminal=is_terminal)
    return Text.assemble("text, ", unpredicted, ", ", (_END, "magenta"), " where a document ends")


def _described(batches: "Batches", sequence: int) -> str:
    row = batches.sequences[sequence]
    predicted = int((row.labels != _ignore()).sum())
    apart = ""
    if not batches.sequences.attend_across_documents:
        documents = len(row.document_lengths)
        apart = " in 1 document" if documents == 1 else f" in {documents} documents kept apart"
    return (
        f"sequence {sequence:,}, from {batches.source_of(sequence).name}, {len(row.tokens):,} tokens{apart}, "
        f"{predicted:,} predictions count"
    )


def _ignore() -> int:
    from triax.data.packing import IGNORE

    return IGNORE


def rendered(row: "TokenSequence", tokenizer: "Tokenizer", *, is_terminal: bool) -> Text:
    """Return the text of a sequence, with marks: a square ends a document, a line parts what attention keeps apart, and
    what nothing predicts is dim on a terminal and in angle brackets elsewhere."""
    documents = np.repeat(np.arange(len(row.document_lengths)), row.document_lengths)
    is_predicted = np.concatenate(([False], row.labels[:-1] != _ignore()))
    is_end = row.tokens == tokenizer.eos_id
    kinds = list(zip(documents.tolist(), is_predicted.tolist(), is_end.tolist(), strict=True))
    text = Text()
    document_before = 0
    # Tokens of one kind are decoded together.
    for (document, predicted, end), places in groupby(range(len(kinds)), kinds.__getitem__):
        if document != document_before:
            text.append(f"\n{_CUT}\n", style="cyan")
        document_before = document
        ids = row.tokens[list(places)].tolist()
        if end:
            text.append(f"{_END * len(ids)}\n", style="magenta")
        else:
            decoded = _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", tokenizer.decode(ids))
            text.append_text(_marked(decoded, predicted, is_terminal=is_terminal))
    return text


def _marked(text: str, is_predicted: bool, *, is_terminal: bool) -> Text:
    if is_predicted:
        return Text(text)
    return Text(text, style="dim italic") if is_terminal else Text(f"⟨{text}⟩")
