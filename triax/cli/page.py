"""How does a page of lines come to standard output? Headings bold in a terminal, plain in a pipe."""

import sys
from collections.abc import Iterable


def print_page(lines: Iterable[str]) -> None:
    """Print ``lines``, of which those without an indent are headings."""
    if not sys.stdout.isatty():
        for line in lines:
            print(line)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        console.print(Text(line, style="" if line.startswith((" ", "->")) else "bold"))
