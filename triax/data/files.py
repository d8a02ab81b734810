"""Which files, in which order, does a list of paths, folders and patterns stand for?

The order is part of the result of a run, so it never depends on the file system: the words keep their order, and what a
folder or a pattern stands for is sorted by path.
"""

import glob
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from triax.data.archive import inner_name, is_compressed
from triax.data.pieces import SourceFile, listed
from triax.errors import BadInput
from triax.spec.data import Format, SourceSpec, TokenDtype

ENDINGS: Final[dict[Format, tuple[str, ...]]] = {
    "text": (".txt", ".text", ".md", ".rst", ".tex"),
    "jsonl": (".jsonl", ".ndjson"),
    "csv": (".csv",),
    "tsv": (".tsv", ".tab"),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather"),
    "megatron": (".idx",),
    "tokens": (".npy",),
}
"""The endings a folder is searched for. A file that is named itself may have any other."""

TOKEN_FORMATS: Final[tuple[Format, ...]] = ("megatron", "tokens")
"""What holds tokens in place of text."""

_COMPRESSIBLE: Final[tuple[Format, ...]] = ("text", "jsonl", "csv", "tsv")

_OF_ENDING: Final[dict[str, Format]] = {ending: name for name, endings in ENDINGS.items() for ending in endings}

_NOT_TEXT: Final = frozenset((
    ".7z", ".bin", ".gguf", ".json", ".npz", ".pdf", ".pt", ".pyc", ".safetensors", ".so", ".tar", ".tgz", ".zip",
))  # fmt: skip
"""Endings whose content is not read as text unless the format says so."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a folder is searched for, and how a file is read."""

    format: Literal["auto"] | Format
    endings: tuple[str, ...]
    token_dtype: TokenDtype | None

    def matches(self, path: Path) -> bool:
        """Return whether a folder's search takes ``path``."""
        return path.name.lower().endswith(self.endings) or inner_name(path).endswith(self.endings)

    def file(self, path: Path) -> SourceFile:
        """Return how ``path`` is read; raise BadInput where nothing says it."""
        its_format = _format_of(path) if self.format == "auto" else self.format
        if its_format == "megatron":
            path = path.with_suffix(".idx")
        if is_compressed(path) and its_format not in _COMPRESSIBLE:
            raise BadInput(f"{path}: {its_format} files are not read compressed; decompress it.")
        return SourceFile(path, its_format, self.token_dtype)


def find_source_files(source: SourceSpec) -> tuple[SourceFile, ...]:
    """Return the files of a source of a run; raise BadInput as ``find_files`` does."""
    assert source.format is not None
    return find_files(
        source.train, file_format=source.format, extensions=source.extensions or (), token_dtype=source.token_dtype
    )


def find_files(
    words: Sequence[str],
    *,
    file_format: Literal["auto"] | Format = "auto",
    extensions: Sequence[str] = (),
    token_dtype: TokenDtype | None = None,
) -> tuple[SourceFile, ...]:
    """Return the files that ``words`` (files, folders, glob patterns) stand for, in their fixed order.

    Folders, also those a pattern matches, are searched to any depth for files ending in one of ``extensions``, or,
    where none is given, in what ``file_format`` reads (``ENDINGS``); names that start with a dot are left out. A folder
    that Hugging Face ``datasets`` saved stands for its Arrow files. Of two names in one folder for one file the file
    itself counts. Raises BadInput where a word stands for nothing, where two words stand for the same file, and where
    ``auto`` cannot tell what a file is, or which of several kinds in a folder is meant.
    """
    endings = tuple(f".{ending.lower().removeprefix('.')}" for ending in extensions)
    wanted = _Wanted(file_format, endings or _endings(file_format), token_dtype)
    files: list[SourceFile] = []
    named_by: dict[str, str] = {}
    for word in words:
        for path in _each_once(_paths(word, wanted)):
            file = wanted.file(path)
            identity = os.path.realpath(file.path)
            if identity in named_by:
                first = named_by[identity]
                raise BadInput(f"{path} is in data.train twice, by {first!r} and by {word!r}: name it once.")
            named_by[identity] = word
            files.append(file)
    return tuple(files)


def _each_once(paths: list[Path]) -> list[Path]:
    """Return ``paths`` with one of those that stand for the same file, rather the file than a link to it: a folder that
    has two names for a file means it once."""
    named: dict[str, Path] = {}
    for path in paths:
        identity = os.path.realpath(path)
        if identity not in named or (named[identity].is_symlink() and not path.is_symlink()):
            named[identity] = path
    chosen = set(named.values())
    return [path for path in paths if path in chosen]


def _endings(file_format: Literal["auto"] | Format) -> tuple[str, ...]:
    return tuple(_OF_ENDING) if file_format == "auto" else ENDINGS[file_format]


def _format_of(path: Path) -> Format:
    ending = Path(inner_name(path)).suffix
    if ending == ".bin" and path.with_suffix(".idx").is_file():
        return "megatron"
    if ending in _NOT_TEXT:
        say = {
            ".json": '"jsonl" if it has one object per line',
            ".bin": '"tokens", and its token_dtype, if it is a flat array; Megatron\'s tokens have an .idx beside them',
        }.get(ending, '"text" or "jsonl" if it is one')
        raise BadInput(f'{path}: data.format = "auto" reads no {ending} files; say {say}.')
    return _OF_ENDING.get(ending, "text")


def _paths(word: str, wanted: _Wanted) -> list[Path]:
    path = Path(word).expanduser()
    # A name that exists is taken as it is, also if it holds a bracket or a star.
    if os.path.lexists(path):
        return _search(path, wanted) if path.is_dir() else [_readable(path)]
    if not glob.has_magic(word):
        index = path.with_name(f"{path.name}.idx")
        if wanted.format in ("auto", "megatron") and index.is_file():
            return [index]  # Megatron names its two files by what they share
        raise BadInput(f"{path} is missing: data.train needs files, folders or patterns that exist.")
    matches = [Path(match) for match in glob.iglob(str(path), recursive=True)]
    # Both files of a pair are one corpus.
    found = {match for match in matches if match.is_file() and not (wanted.format == "auto" and _is_second(match))}
    for folder in matches:
        if folder.is_dir():
            found.update(file for file in _walk(folder, frozenset()) if wanted.matches(file))
    if not found:
        what = f"only folders, none with a file ending in {' '.join(wanted.endings)}" if matches else "no file"
        raise BadInput(f"The pattern {str(path)!r} in data.train matches {what}.")
    return sorted(found, key=lambda file: file.parts)


def _is_second(path: Path) -> bool:
    return path.suffix == ".bin" and path.with_suffix(".idx").is_file()


def _readable(path: Path) -> Path:
    if not path.is_file():
        what = "a link to nothing" if path.is_symlink() and not path.exists() else "not a regular file"
        raise BadInput(f"{path} is {what}: data.train needs files, folders or patterns.")
    return path


def _search(folder: Path, wanted: _Wanted) -> list[Path]:
    if wanted.format in ("auto", "arrow") and (folder / "state.json").is_file():
        return _saved_dataset(folder)
    if wanted.format in ("auto", "arrow") and (folder / "dataset_dict.json").is_file():
        return _only_split(folder)
    found = sorted(_walk(folder, frozenset()), key=lambda file: file.parts)
    taken = [file for file in found if wanted.matches(file)]
    if not taken:
        raise BadInput(f"{folder} holds no file ending in {' '.join(wanted.endings)}{_instead(found)}.")
    if wanted.format == "auto":
        _require_one_kind(folder, taken)
    return taken


def _require_one_kind(folder: Path, files: Iterable[Path]) -> None:
    """Raise BadInput where documents lie beside tables or tokens: a README beside Parquet files is not meant."""
    kinds: Counter[str] = Counter()
    example: dict[str, str] = {}
    for file in files:
        its_format = _format_of(file)
        kind = "text" if its_format == "jsonl" else its_format
        kinds[kind] += 1
        example.setdefault(kind, Path(inner_name(file)).suffix)
    if len(kinds) > 1:
        held = " and ".join(f"{count:,} {kind} file{'s' * (count > 1)}" for kind, count in kinds.most_common())
        most = kinds.most_common(1)[0][0]
        say = f'data.format = "{most}" or data.extensions = ["{example[most]}"]'
        raise BadInput(f"{folder} holds {held}: say which is meant, as in {say}.")


def _saved_dataset(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder that ``datasets.Dataset.save_to_disk`` wrote, in its order."""
    state = _json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise BadInput(f"{folder} was saved with a selection of its rows: save its flatten_indices() in its place.")
    names = [row.get("filename") if isinstance(row, dict) else None for row in state.get("_data_files") or [{}]]
    return [_readable(folder / _plain_name(name, folder / "state.json")) for name in names]


def _only_split(folder: Path) -> list[Path]:
    splits = _json(folder / "dataset_dict.json").get("splits")
    names = [_plain_name(name, folder / "dataset_dict.json") for name in splits] if isinstance(splits, list) else []
    if len(names) != 1:
        raise BadInput(f"{folder} holds the splits {listed(names) or 'none'}: name one, such as {folder / 'train'}.")
    return _saved_dataset(folder / names[0])


def _plain_name(name: Any, said_by: Path) -> str:
    """Return ``name`` if it can only mean something inside the folder of the file that says it."""
    if not isinstance(name, str) or Path(name).name != name or name == "..":
        raise BadInput(f"{said_by} names {str(name)[:80]!r} as a part of the dataset, and it is none in that folder.")
    return name


def _json(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise BadInput(f"{path} is no JSON object, as datasets writes it.")
    return said


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
