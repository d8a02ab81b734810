"""How do files and ``key=value`` words become a Run, a Plan or a Cluster?"""

import glob
import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from triax.errors import BadInput
from triax.spec.cluster import Cluster, parse_cluster
from triax.spec.faults import shown, validated
from triax.spec.model_source import resolve_model
from triax.spec.plan import Plan
from triax.spec.run import FORMAT_VERSION, Run
from triax.spec.text_file import first_words, parse_json, read_text

_LARGEST_TOML_BYTES: Final = 1 << 20
"""A run file is written by hand; anything larger is some other file."""

_LARGEST_JSON_BYTES: Final = 1 << 26
"""A plan lists the layouts that were not chosen, about a kilobyte each."""

_KEY_PART: Final = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_LONG_KEY: Final = re.compile(rf"(?<![\w-])(?:{_KEY_PART}\.[ \t]*+){{32}}{_KEY_PART}[=\]]")
"""The last 33 parts of a key of so many or more: no section is that deep, and reading one takes time in the square of
its parts. No part can be read in two ways, so nothing is tried twice; a possessive group would say so, and Python
before 3.11.5 matches it wrongly (python/cpython#106052)."""

_LAYOUT_WORD: Final = re.compile(r"[^\s,\[]+(?:\[[^\]]*\]?)?")
"""A word of ``--layout``; a list in brackets may hold spaces and commas."""


def load_run(path: Path, overrides: Sequence[str] = ()) -> Run:
    """Return the run that the TOML file at ``path`` says, with ``section.key=value`` overrides applied.

    Relative paths in ``[data]`` and ``[model]`` start at the file's folder. Raises BadInput with every fault found.
    """
    said = _read_toml(path)
    _override_all(said, overrides)
    run = validated(Run, resolve_model(said, path), str(path))
    return _with_absolute_paths(run, path)


def load_plan(path: Path) -> Plan:
    """Return the plan that the JSON file at ``path`` holds; raise BadInput where it is not one triax wrote."""
    said = parse_json(read_text(path, _LARGEST_JSON_BYTES), str(path))
    _check_version(said, str(path))
    return validated(Plan, said, str(path))


def load_cluster(text: str) -> Cluster:
    """Return the cluster that ``text`` says: the short form ``16x8xh100``, or the path of a TOML file."""
    if text.endswith(".toml"):
        return validated(Cluster, _read_toml(Path(text)), text)
    return parse_cluster(text)


def layout_words(text: str) -> list[str]:
    """Return the overrides that ``--layout "pp=2 tp=2"`` stands for: ``["layout.pp=2", "layout.tp=2"]``."""
    return [f"layout.{word.removeprefix('layout.')}" for word in _LAYOUT_WORD.findall(text)]


def _read_toml(path: Path) -> dict[str, Any]:
    """Return what a TOML file says, without its ``format_version``."""
    text = read_text(path, _LARGEST_TOML_BYTES)
    if _LONG_KEY.search(text):
        raise BadInput(f"{path} has a key of more than 32 parts: write [section] and key = value.")
    try:
        said = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path} is not valid TOML: {error}.") from None
    except (RecursionError, ValueError) as error:
        raise BadInput(f"{path} is not valid TOML: {first_words(error)}.") from None
    _check_version(said, str(path))
    said.pop("format_version", None)
    return said


def _check_version(said: dict[str, Any], origin: str) -> None:
    """Raise BadInput for a file that a later triax wrote, before its new keys are called unknown."""
    version = said.get("format_version", FORMAT_VERSION)
    if isinstance(version, int) and 1 <= version <= FORMAT_VERSION:
        return
    raise BadInput(
        f"{origin} has format_version={shown(version)}, and this version of triax reads up to {FORMAT_VERSION}: "
        f"use the version of triax that wrote it, or a newer one."
    )


def _override_all(said: dict[str, Any], words: Sequence[str]) -> None:
    """Apply ``section.key=value`` words to ``said``; raise BadInput with every word that cannot be applied."""
    faults = []
    for word in words:
        try:
            _override(said, word)
        except BadInput as error:
            faults.append(str(error))
    if faults:
        raise BadInput("\n".join(faults))


def _override(said: dict[str, Any], word: str) -> None:
    key, equals, text = word.partition("=")
    *sections, name = key.strip().split(".")
    if not equals or not sections or not all((*sections, name)):
        raise BadInput(f"{shown(word)} is no override: write section.key=value, such as train.steps=200.")
    table = said
    for depth, section in enumerate(sections, 1):
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            place = ".".join(sections[:depth])
            raise BadInput(
                f"{shown(word)} cannot be applied: the file says {place} = {shown(table)}, which is no section."
            )
    table[name] = _parse_value(text.strip())


def _parse_value(text: str) -> Any:
    """Return ``text`` as TOML would read it, or as the text itself: ``3e-4`` is a number, ``cosine`` a word."""
    line = f"value = {text}"
    if "\n" in text or "\r" in text or _LONG_KEY.search(line):
        return text
    try:
        return tomllib.loads(line)["value"]
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        return text


def _with_absolute_paths(run: Run, path: Path) -> Run:
    """Return ``run`` with the paths of ``[data]`` made absolute, so that they mean the same from any folder."""
    data = run.data.model_dump()
    for said in data["source"] or (data,):
        said["train"] = tuple(_absolute(path, word) for word in said["train"])
    if run.data.tokenizer != "bytes":
        data["tokenizer"] = _absolute(path, run.data.tokenizer)
    if run.data.cache_dir is not None:
        data["cache_dir"] = _absolute(path, run.data.cache_dir)
    return run.model_copy(update={"data": validated(type(run.data), data, f"{path}: [data]")})


def _absolute(run_file: Path, word: str) -> str:
    """Return a path or pattern as seen from the folder of ``run_file``."""
    try:
        folder, seen = run_file.resolve().parent, Path(word).expanduser()
    except RuntimeError as error:
        raise BadInput(f"{run_file}: {shown(word)} is no path: {str(error).rstrip('.')}.") from None
    whole = folder / seen
    if glob.has_magic(word) and not os.path.lexists(whole):
        # Only the user's word is a pattern: a bracket in the folder's own name means itself.
        whole = Path(glob.escape(str(folder))) / seen
    return str(whole)
