"""How do files and ``key=value`` words become a Run, a Plan or a Cluster, and what does a user read when they are wrong?"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from triax.errors import BadInput
from triax.spec.cluster import Cluster, parse_cluster
from triax.spec.foreign_keys import FOREIGN_KEYS
from triax.spec.plan import Plan
from triax.spec.run import Run
from triax.spec.value import Value

_Said = TypeVar("_Said", bound=Value)

_LARGEST_FILE_BYTES = 1 << 20
"""A run file is written by hand; anything larger is some other file."""


def load_run(path: Path, overrides: Sequence[str] = ()) -> Run:
    """Return the run that the TOML file at ``path`` says, with ``section.key=value`` overrides applied.

    Relative paths in ``[data]`` are taken from the file's folder. Raises BadInput with every fault found.
    """
    said = _parse_toml(_read_text(path), str(path))
    for word in overrides:
        _override(said, word)
    run = _validate(Run, said, str(path))
    return _with_absolute_paths(run, path.resolve().parent)


def load_plan(path: Path) -> Plan:
    """Return the plan that the JSON file at ``path`` holds; raise BadInput where it is not one triax wrote."""
    return _validate(Plan, _parse_json(_read_text(path), str(path)), str(path))


def load_cluster(text: str) -> Cluster:
    """Return the cluster that ``text`` says: the short form ``16x8xh100``, or the path of a TOML file."""
    path = Path(text)
    if path.suffix == ".toml":
        return _validate(Cluster, _parse_toml(_read_text(path), text), text)
    return parse_cluster(text)


def layout_words(text: str) -> list[str]:
    """Return the overrides that ``--layout "pp=2 tp=2"`` stands for: ``["layout.pp=2", "layout.tp=2"]``."""
    return [f"layout.{word}" for word in text.replace(",", " ").split()]


def _read_text(path: Path) -> str:
    try:
        if not path.is_file():
            what = "a folder" if path.is_dir() else "missing"
            raise BadInput(f"{path} is {what}: give the path of a file.")
        size = path.stat().st_size
        if size > _LARGEST_FILE_BYTES:
            raise BadInput(f"{path} has {size:,} bytes, and no file of this kind is larger than {_LARGEST_FILE_BYTES:,}.")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text: byte {error.start} cannot be read.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInput(f"{str(path)[:200]!r} cannot be read: {reason}.") from None


def _parse_toml(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{origin} is not valid TOML: {error}.") from None
    except (RecursionError, ValueError) as error:
        raise BadInput(f"{origin} is not valid TOML: {_first_words(error)}.") from None


def _parse_json(text: str, origin: str) -> dict[str, Any]:
    try:
        said = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise BadInput(f"{origin} is not valid JSON: {error.msg} at line {error.lineno}.") from None
    except (RecursionError, ValueError) as error:
        raise BadInput(f"{origin} is not valid JSON: {_first_words(error)}.") from None
    if not isinstance(said, dict):
        raise BadInput(f"{origin} holds a JSON {type(said).__name__}, and a plan is an object.")
    return said


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _first_words(error: BaseException) -> str:
    return str(error).split("\n")[0][:200] or type(error).__name__


def _override(said: dict[str, Any], word: str) -> None:
    key, equals, text = word.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot or not section or not name:
        raise BadInput(f"{word!r} is no override: write section.key=value, such as train.steps=200.")
    table = said.setdefault(section, {})
    if not isinstance(table, dict):
        raise BadInput(f"{word!r} cannot be applied: the file says {section} = {str(table)[:60]!r}, which is no section.")
    table[name] = _parse_value(text.strip())


def _parse_value(text: str) -> Any:
    """Return ``text`` as TOML would read it, or as the text itself: ``3e-4`` is a number, ``cosine`` a word."""
    if "\n" in text or "\r" in text:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        return text


def _validate(kind: type[_Said], said: Mapping[str, Any], origin: str) -> _Said:
    faults = _unknown_keys(kind, said, "")
    if not faults:
        try:
            return kind.model_validate(dict(said))
        except ValidationError as error:
            faults = [_fault(kind, item) for item in error.errors(include_url=False, include_context=False)]
    raise BadInput("\n".join(f"{origin}: {fault}" for fault in dict.fromkeys(faults)))


def _unknown_keys(kind: type[BaseModel], said: Mapping[str, Any], prefix: str) -> list[str]:
    """Return one sentence for each key of ``said`` that ``kind`` does not have, sections within sections included."""
    faults: list[str] = []
    for key, value in said.items():
        full = f"{prefix}{key}"
        field = kind.model_fields.get(key)
        if field is None:
            faults.append(_unknown_key(kind, key, full, prefix))
            continue
        section = next((part for part in (field.annotation, *get_args(field.annotation)) if _is_section(part)), None)
        if section is not None and isinstance(value, Mapping):
            faults += _unknown_keys(section, value, f"{full}.")
    return faults


def _is_section(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, BaseModel)


def _unknown_key(kind: type[BaseModel], key: str, full: str, prefix: str) -> str:
    shown = full[:80]
    foreign = FOREIGN_KEYS.get(key.lower().replace("-", "_").lstrip("_"))
    if foreign is not None and foreign != full:
        return f"unknown key {shown!r}: that setting is called {foreign} here."
    names = list(kind.model_fields)
    near = get_close_matches(key, names, n=1, cutoff=0.6)
    if near:
        return f"unknown key {shown!r}: did you mean {prefix}{near[0]}?"
    elsewhere = [f"{name}.{key}" for name, field in Run.model_fields.items() if key in _keys_of(field.annotation)]
    if elsewhere:
        return f"unknown key {shown!r}: {elsewhere[0]} exists; did you mean that?"
    where = f"[{prefix.rstrip('.')}]" if prefix else "the file"
    return f"unknown key {shown!r}: {where} knows {', '.join(names)}."


def _keys_of(annotation: Any) -> set[str]:
    parts = (annotation, *get_args(annotation))
    return {name for part in parts if _is_section(part) for name in part.model_fields}


def _fault(kind: type[Value], item: Any) -> str:
    """Return one pydantic fault as a sentence: which key, what was given, what would be legal."""
    place = ".".join(str(part) for part in item["loc"])
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "missing":
        return f"{place} is missing: it must be given."
    given = repr(item.get("input"))
    if item["type"] == "value_error":
        return f"{place}: {message}" if place else message
    return f"{place} = {given[:80]} cannot be: {message[:1].lower()}{message[1:]}."


def _with_absolute_paths(run: Run, folder: Path) -> Run:
    """Return ``run`` with the paths of ``[data]`` made absolute, so that they mean the same from any folder."""
    update: dict[str, Any] = {"train": tuple(str(folder / Path(path).expanduser()) for path in run.data.train)}
    if run.data.tokenizer != "bytes":
        update["tokenizer"] = str(folder / Path(run.data.tokenizer).expanduser())
    if run.data.cache_dir is not None:
        update["cache_dir"] = str(folder / Path(run.data.cache_dir).expanduser())
    return run.model_copy(update={"data": run.data.model_copy(update=update)})
