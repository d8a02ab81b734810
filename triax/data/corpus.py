"""Which files, in which order, does a list of paths, folders and patterns stand for?

The order is part of the result of a run, so it never depends on the file system: the words keep their order, and what a
folder or a pattern stands for is sorted by path.
"""

import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

from triax.data.source import Format, SourceFile
from triax.errors import BadInput

ENDINGS: Final[dict[Format, tuple[str, ...]]] = {
    "text": (".txt", ".text", ".md", ".rst", ".tex"),
    "jsonl": (".jsonl", ".ndjson"),
}
"""The endings a folder is searched for. A file that is named itself may have any other."""

_NOT_TEXT: Final = frozenset((
    ".7z", ".arrow", ".bin", ".bz2", ".csv", ".gguf", ".gz", ".idx", ".json", ".npy", ".npz", ".parquet", ".pdf", ".pt",
    ".pyc", ".safetensors", ".so", ".tar", ".tgz", ".tsv", ".xz", ".zip", ".zst",
))  # fmt: skip
"""Endings whose content is not read as text unless the format says so."""


def find_files(
    words: Sequence[str], *, file_format: Literal["auto"] | Format = "auto", extensions: Sequence[str] = ()
) -> tuple[SourceFile, ...]:
    """Return the files that ``words`` (files, folders, glob patterns) stand for, in their fixed order.

    Folders, also those a pattern matches, are searched to any depth for files ending in one of ``extensions``, or,
    where none is given, in what ``file_format`` reads (``ENDINGS``); names that start with a dot are left out. Raises
    BadInput where a word stands for nothing, where two stand for the same file, and where ``auto`` cannot tell what a
    file is.
    """
    wanted = tuple(f".{ending.lower().removeprefix('.')}" for ending in extensions) or _endings(file_format)
    files: list[SourceFile] = []
    named_by: dict[str, str] = {}
    for word in words:
        for path in _paths(word, wanted):
            identity = os.path.realpath(path)
            if identity in named_by:
                first = named_by[identity]
                raise BadInput(f"{path} is in data.train twice, by {first!r} and by {word!r}: name it once.")
            named_by[identity] = word
            files.append(SourceFile(path, _format_of(path) if file_format == "auto" else file_format))
    return tuple(files)


def _endings(file_format: Literal["auto"] | Format) -> tuple[str, ...]:
    if file_format == "auto":
        return tuple(ending for endings in ENDINGS.values() for ending in endings)
    return ENDINGS[file_format]


def _format_of(path: Path) -> Format:
    ending = path.suffix.lower()
    if ending in _NOT_TEXT:
        raise BadInput(f'{path}: data.format = "auto" reads no {ending} files; say "text" or "jsonl" if it is one.')
    return "jsonl" if ending in ENDINGS["jsonl"] else "text"


def _paths(word: str, wanted: tuple[str, ...]) -> list[Path]:
    path = Path(word).expanduser()
    # A name that exists is taken as it is, also if it holds a bracket or a star.
    if os.path.lexists(path):
        return _search(path, wanted) if path.is_dir() else [_readable(path)]
    if not glob.has_magic(word):
        raise BadInput(f"{path} is missing: data.train needs files, folders or patterns that exist.")
    matches = [Path(match) for match in glob.iglob(str(path), recursive=True)]
    found = {match for match in matches if match.is_file()}
    for folder in matches:
        if folder.is_dir():
            found.update(file for file in _walk(folder, frozenset()) if file.name.lower().endswith(wanted))
    if not found:
        what = f"only folders, none with a file ending in {' '.join(wanted)}" if matches else "no file"
        raise BadInput(f"The pattern {str(path)!r} in data.train matches {what}.")
    return sorted(found, key=lambda file: file.parts)


def _readable(path: Path) -> Path:
    if not path.is_file():
        what = "a link to nothing" if path.is_symlink() and not path.exists() else "not a regular file"
        raise BadInput(f"{path} is {what}: data.train needs files, folders or patterns.")
    return path


def _search(folder: Path, wanted: tuple[str, ...]) -> list[Path]:
    found = sorted(_walk(folder, frozenset()), key=lambda file: file.parts)
    taken = [file for file in found if file.name.lower().endswith(wanted)]
    if not taken:
        raise BadInput(f"{folder} holds no file ending in {' '.join(wanted)}{_instead(found)}.")
    return taken


def _instead(found: Iterable[Path]) -> str:
    """Say what a folder holds in place of what was looked for."""
    counts = Counter(path.suffix.lower() for path in found if path.suffix)
    if not counts:
        return ""
    ending, count = counts.most_common(1)[0]
    return f'; it has {count:,} ending in {ending}: data.extensions = ["{ending}"] takes those'


def _walk(folder: Path, parents: frozenset[tuple[int, int]]) -> Iterator[Path]:
    """Yield the regular files below ``folder``, through links too, but into no folder that is its own parent."""
    try:
        status = folder.stat()
        identity = (status.st_dev, status.st_ino)
        if identity in parents:
            return
        for entry in os.scandir(folder):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _walk(Path(entry.path), parents | {identity})
            elif entry.is_file():
                yield Path(entry.path)
    except OSError as error:
        raise BadInput(f"{folder} cannot be searched: {error.strerror or error}.") from None
