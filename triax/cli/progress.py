"""What does a person see while text becomes tokens?"""

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from triax.spec.run import Run

if TYPE_CHECKING:
    from triax.data.corpus import Corpus


def preparing(run: Run, *, quiet: bool = False) -> "Corpus":
    """Return the tokens of ``run``, with a bar on standard error where it is a terminal."""
    from triax.train.corpus import prepare_tokens

    console = Console(stderr=True)
    columns = (TextColumn("tokens of text"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None)
        return prepare_tokens(run, lambda done, total: bar.update(task, completed=done, total=total))
