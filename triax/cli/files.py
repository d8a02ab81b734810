"""How does a verb write what it was asked to write into a file?"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triax.errors import BadInput


def write_json(value: Mapping[str, Any], where: str) -> None:
    """Write ``value`` to the file ``where``, or to standard output where it is ``-``; raise BadInput as ``write_text``
    does."""
    text = json.dumps(value, indent=2)
    if where == "-":
        print(text)
    else:
        write_text(Path(where), text + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``; raise BadInput where that cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "no such path can be"
        raise BadInput(f"{path} cannot be written: {reason[:1].lower()}{reason[1:]}.") from None
