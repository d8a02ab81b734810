"""Which set of ranks may write into a run's folder? That of the newest generation, whose file the agents have made.

Agents make the files and ranks obey them; they meet here alone.
"""

import os
import re
from pathlib import Path
from typing import Final

AGENTS: Final = ".agents"
"""Folder in a run's folder by which the agents of several servers speak to each other."""

_NAME: Final = re.compile(r"([a-z]+)-([0-9]{8,18})\.json")


def file_name(kind: str, number: int) -> str:
    """Return the name of a file of a kind, such as ``generation``."""
    return f"{kind}-{number:08d}.json"


def newest_number(folder: Path, kind: str) -> int:
    """Return the highest number of the files of a kind in ``folder``; 0 where there is none. Raises OSError.

    The folder is listed, since a network file system may believe for a while that a name is not there.
    """
    matches = (_NAME.fullmatch(name) for name in os.listdir(folder))
    return max((int(match[2]) for match in matches if match and match[1] == kind), default=0)
