"""What does a user read when a value cannot be as it was said? One sentence for each fault, all of them at once."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from types import UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from triax.errors import BadInput
from triax.spec.foreign_keys import FOREIGN_KEYS
from triax.spec.run import Run
from triax.spec.value import Value

_Said = TypeVar("_Said", bound=Value)

_MOST_SHOWN: Final = 20
"""Faults in one message: a file with more of them is most likely another kind of file."""

_LONGEST: Final = 400
"""Characters of one sentence: what was given may be long, and the sentence quotes it."""

_ADVICE: Final[dict[str, str]] = {
    "int_type": "use a whole number",
    "int_from_float": "use a whole number",
    "float_type": "use a number, such as 0.1",
    "bool_type": "use true or false",
    "string_type": "use text in quotes",
    "string_unicode": "use text that UTF-8 can write",
    "string_too_short": "use text that is not empty",
    "string_too_long": "use a text of at most {max_length} characters",
    "tuple_type": "use a list in square brackets",
    "too_short": "use a list of at least {min_length}",
    "finite_number": "use a finite number",
    "greater_than_equal": "use {ge} or more",
    "greater_than": "use more than {gt}",
    "less_than_equal": "use {le} or less",
    "less_than": "use less than {lt}",
    "literal_error": "use {expected}",
    "extra_forbidden": "there is no such key",
}
"""What would be legal, by pydantic's name of the fault; the braces are filled from the fault itself."""


def validated(kind: type[_Said], said: Mapping[str, Any], origin: str) -> _Said:
    """Return ``said`` as a value of ``kind``; raise BadInput with one line for each fault, which ``origin`` begins."""
    unknown = list(islice(_unknown_keys(kind, said, ""), _MOST_SHOWN + 1))
    try:
        value = kind.model_validate(dict(said))
    except ValidationError as error:
        items = error.errors(include_url=False)
    else:
        if not unknown:
            return value
        items = []
    faults = list(unknown)
    for item in items:
        if item["type"] == "missing" and _is_offered(".".join(map(str, item["loc"])), unknown):
            continue  # it is there by a wrong name, which is told already
        if not unknown or item["type"] != "extra_forbidden":
            faults += _faults(item)
    told = list(dict.fromkeys(faults))
    if len(told) > _MOST_SHOWN:
        told[_MOST_SHOWN:] = ["there are more faults."]
    raise BadInput("\n".join(f"{origin}: {fault}" for fault in told))


def shown(value: Any) -> str:
    """Return ``value`` as an error message quotes it, in at most 80 characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        # Python writes no integer of more than 4300 digits, although it reads one in hexadecimal.
        return f"(a {type(value).__name__} that cannot be shown)"
    return text if len(text) <= 80 else f"{text[:76]} ..."


def _unknown_keys(kind: type[BaseModel], said: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield one sentence for each key of ``said`` that ``kind`` does not have, sections within sections included."""
    for key, value in said.items():
        field = kind.model_fields.get(key)
        section = None if field is None else _section_of(field.annotation)
        if field is None:
            yield _unknown_key(kind, key, prefix)
            if isinstance(value, Mapping):
                yield from _known_elsewhere(value, f"{prefix}{key}.")
        elif section is not None and isinstance(value, Mapping):
            yield from _unknown_keys(section, value, f"{prefix}{key}.")
        elif section is not None and isinstance(value, list | tuple):
            for number, row in enumerate(value):
                if isinstance(row, Mapping):
                    yield from _unknown_keys(section, row, f"{prefix}{key}.{number}.")


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a field is, or that each of its rows is: ``Cluster`` for the annotation
    ``Cluster | None`` and for ``tuple[Cluster, ...]``; None for a plain field."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    has_parts = get_origin(annotation) in (Union, UnionType, Annotated, tuple)
    return next(filter(None, map(_section_of, get_args(annotation))), None) if has_parts else None


def _unknown_key(kind: type[BaseModel], key: str, prefix: str) -> str:
    what = f"unknown key {shown(prefix + key)}"
    if name := _foreign(key):
        return f"{what}: that setting is called {name} here."
    names = list(kind.model_fields)
    if near := get_close_matches(key[:80].lower(), names, n=1, cutoff=0.6):
        return f"{what}: did you mean {prefix}{near[0]}?"
    if name := _elsewhere(key):
        return f"{what}: did you mean {name}?"
    where = f"[{prefix.rstrip('.')}]" if prefix else "the file"
    return f"{what}: {where} knows {', '.join(names)}."


def _known_elsewhere(said: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield where to put the keys of another tool's section, as far as they have a place here."""
    for key in said:
        if name := _foreign(key):
            yield f"unknown key {shown(prefix + key)}: that setting is called {name} here."
        elif name := _elsewhere(key):
            yield f"unknown key {shown(prefix + key)}: did you mean {name}?"


def _is_offered(name: str, unknown: list[str]) -> bool:
    return any(line.endswith((f"did you mean {name}?", f"is called {name} here.")) for line in unknown)


def _foreign(key: str) -> str | None:
    return FOREIGN_KEYS.get(key[:80].lower().replace("-", "_").lstrip("_"))


def _elsewhere(key: str) -> str | None:
    """Return the full name of a key of a run that is called ``key`` but stands in a section."""
    for name, field in Run.model_fields.items():
        section = _section_of(field.annotation)
        if section is not None and key in section.model_fields:
            return f"{name}.{key}"
    return None


def _faults(item: Any) -> list[str]:
    """Return one of pydantic's faults as sentences: which key, what was given, what would be legal."""
    place, given, context = ".".join(map(str, item["loc"])), item["input"], item.get("ctx", {})
    given = list(given) if isinstance(given, tuple) else given  # as the user wrote it
    match item["type"]:
        case "missing":
            return [f"{place} is missing: it must be given."]
        case "value_error":
            sentences = [sentence[:_LONGEST] for sentence in str(context["error"]).split("\n")]
            return [f"{place}: {sentence}" if place else sentence for sentence in sentences]
        case "model_type" | "model_attributes_type" | "dict_type":
            name = _foreign(place) or f"a key below [{place}]"
            return [f"{place} = {shown(given)} cannot be: {place} is a section; set {name} instead."]
        case known if known in _ADVICE:
            return [f"{place} = {shown(given)} cannot be: {_ADVICE[known].format(**context)}."]
    message = str(item["msg"])
    return [f"{place} = {shown(given)} cannot be: {message[:1].lower()}{message[1:]}."]
