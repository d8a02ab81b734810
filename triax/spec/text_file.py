"""How is a text file read that a person, or any other tool, wrote? With a sentence for whatever is wrong with it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from triax.errors import BadInput
from triax.spec.faults import shown


def read_text(path: Path, most_bytes: int) -> str:
    """Return the UTF-8 text of a file of at most ``most_bytes``; raise BadInput where there is none."""
    try:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "is no regular file" if path.exists() else "does not exist"
            raise BadInput(f"{path} {what}: give the path of a file.")
        size = path.stat().st_size
        if size > most_bytes:
            raise BadInput(f"{path} has {size:,} bytes, and no file of this kind is larger than {most_bytes:,}.")
        # Editors on Windows begin a file with a byte order mark, which is no part of the text.
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text: byte {error.start} cannot be read.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInput(f"{shown(str(path))} cannot be read: {reason}.") from None


def parse_json(text: str, origin: str) -> dict[str, Any]:
    """Return the JSON object that ``text`` is; raise BadInput, which ``origin`` begins, for anything else.

    NaN and infinities are refused, and keys that stand twice in one object, of which a reader takes either.
    """
    try:
        said = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise BadInput(f"{origin} is not valid JSON: {error.msg} at line {error.lineno}.") from None
    except (RecursionError, ValueError) as error:
        raise BadInput(f"{origin} is not valid JSON: {first_words(error)}.") from None
    if not isinstance(said, dict):
        raise BadInput(f"{origin} holds a JSON {type(said).__name__}, and must hold an object.")
    return said


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    said = dict(pairs)
    if len(said) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {shown(repeated)} stands twice in one object")
    return said


def first_words(error: BaseException) -> str:
    """Return the first line of what an error says, or its name."""
    return str(error).split("\n")[0][:200] or type(error).__name__
