"""How does a sentence for the user reach standard error, whatever is in it?"""

import io
import os
import sys
from contextlib import suppress


def tell(message: str) -> None:
    """Write ``message`` to standard error, each of its lines as one that says who speaks.

    What would steer a terminal is written as an escape: paths and values of a message come from anywhere.
    """
    lines = [f"triax: {_printable(line)}\n" for line in message.rstrip("\n").split("\n")]
    sys.stderr.write("".join(lines))
    sys.stderr.flush()


def _printable(line: str) -> str:
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape", "replace").decode() for sign in line)


def write_anything() -> None:
    """Let standard output and error take any text: what their encoding lacks is written as an escape.

    One that was closed (``>&-``) leads nowhere from now on: else the next file that is opened would take its place.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # It gets the lowest number that is free, which is this one; ranks inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def be_silent() -> None:
    """Let nothing more go to standard output: it cannot be written, and the interpreter would try again at its end."""
    with suppress(OSError):  # it is no file, and needs no silence
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
