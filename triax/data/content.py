"""Is the content of these files what it was when we last read them?

A file is identified by the SHA-256 of all its bytes: a sample of them would miss an edit in the middle, and train on
stale tokens without a word. Hashing costs about 1/100 of tokenising; to save even that, a memo remembers the hash of a
file by its size and its times of modification and change, as git does for its work tree. Times are never part of an
identity.
"""

import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from triax.errors import BadInput
from triax.spec.value import fingerprint

Stamp = tuple[int, int, int]
"""Bytes, time of modification and time of change (ns): what differs if a file was written to."""

_Memo = dict[str, tuple[Stamp, str]]
_MEMO: Final = TypeAdapter(_Memo)

_SETTLED_AFTER_NS: Final = 2_000_000_000
"""A file touched later than this before the memo is written could change again within one tick of its clock."""


def stamp(path: Path) -> Stamp:
    """Return the stamp of ``path``; raise BadInput if it is gone."""
    try:
        status = path.stat()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def identify(paths: Sequence[Path], cache_folder: Path) -> tuple[list[Stamp], list[str]]:
    """Return the stamp and the SHA-256 of each file, with a memo of these files in ``cache_folder``."""
    name = fingerprint([str(path.absolute()) for path in paths])
    stamps = [stamp(path) for path in paths]
    memo_path = cache_folder / "contents" / f"{name}.json"
    with suppress(OSError):  # it is said when there is something that must be written
        memo_path.parent.mkdir(parents=True, exist_ok=True)
    return stamps, hash_files(paths, memo_path)


def require_unchanged(paths: Sequence[Path], stamps: Sequence[Stamp]) -> None:
    """Raise BadInput where a file was written to since it had its stamp."""
    for path, before in zip(paths, stamps, strict=True):
        if stamp(path) != before:
            raise BadInput(f"{path} was changed while it was read: start again when it is complete.")


def hash_files(paths: Sequence[Path], memo_path: Path) -> list[str]:
    """Return the SHA-256 of each file, in hexadecimal; read those that changed since ``memo_path`` was written.

    The memo is only a saving: where it cannot be read all files are, and where it cannot be written, as in a folder
    that is not there, nothing is lost. Raises BadInput for a file that cannot be read.
    """
    memo = _load(memo_path)
    stamps = {str(path.absolute()): stamp(path) for path in paths}
    unknown = [path for path, its_stamp in stamps.items() if path not in memo or memo[path][0] != its_stamp]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:  # hashlib lets go of the interpreter
        hashes = {path: memo[path][1] for path in stamps if path in memo}
        hashes |= dict(zip(unknown, pool.map(_sha256, unknown), strict=True))
    if unknown:
        _save(memo_path, {path: (its_stamp, hashes[path]) for path, its_stamp in stamps.items()})
    return [hashes[str(path.absolute())] for path in paths]


def _sha256(path: str) -> str:
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from None


def _load(path: Path) -> _Memo:
    try:
        return _MEMO.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return {}


def _save(path: Path, memo: Mapping[str, tuple[Stamp, str]]) -> None:
    latest = time.time_ns() - _SETTLED_AFTER_NS
    settled = {name: entry for name, entry in memo.items() if max(entry[0][1:]) < latest}
    if not settled:
        return
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        temporary.write_text(json.dumps(settled), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
