"""Where do the figures of a benchmark go?"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(value: Mapping[str, Any], where: str) -> None:
    """Write ``value`` to the file ``where``, or to standard output where it is ``-``."""
    text = json.dumps(value, indent=1)
    if where == "-":
        print(text)
    else:
        Path(where).write_text(text + "\n", encoding="utf-8")
