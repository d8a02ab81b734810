"""How does a sentence for the user reach standard error, whatever is in it?"""

import io
import sys


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
    """Let standard output and error take any text: what their encoding lacks is written as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
