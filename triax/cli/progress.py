"""What does a person see while text becomes tokens?"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

if TYPE_CHECKING:
    from triax.data.corpus import Corpus
    from triax.spec.run import Run


@contextmanager
def bar_of_bytes(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error where it is a terminal; yield what it is told of bytes done and to do."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    hidden = quiet or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def preparing(run: "Run", *, quiet: bool = False, num_processes: int | None = None) -> "Corpus":
    """Return the tokens of ``run``, with a bar on standard error where it is a terminal."""
    from triax.train.corpus import prepare_tokens

    with bar_of_bytes("tokens of text", quiet=quiet) as progress:
        return prepare_tokens(run, progress, num_processes=num_processes)
