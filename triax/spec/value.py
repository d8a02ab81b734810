"""What do all the values we say have in common: frozen, no unknown keys, a canonical text to take a fingerprint of."""

import hashlib
import json
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from triax.errors import BadInput
from triax.units import parse_bytes, parse_count


class Value(BaseModel):
    """A frozen value. Unknown keys, wrong types, and numbers that are not finite are errors, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _count(value: Any) -> Any:
    return _parsed(parse_count, value)


def _bytes(value: Any) -> Any:
    return _parsed(parse_bytes, value)


def _parsed(parse: Any, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except BadInput as error:
        raise ValueError(str(error)) from None


def as_tuple(value: Any) -> Any:
    """Return a list as a tuple and anything else unchanged: TOML and JSON know no tuples."""
    return tuple(value) if isinstance(value, list) else value


Count = Annotated[int, BeforeValidator(_count)]
"""An integer, or text with a unit of 1000: ``64_000``, ``"64k"``."""

ByteCount = Annotated[int, BeforeValidator(_bytes)]
"""An integer number of bytes, or text with a unit: ``"80 GiB"``."""

Texts = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
"""Several texts; TOML and JSON write a list."""

Counts = Annotated[tuple[int, ...], BeforeValidator(as_tuple)]
"""Several integers; TOML and JSON write a list."""


def canonical_json(value: Any) -> str:
    """Return the one text that equal plain values share: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def fingerprint(value: Any) -> str:
    """Return 16 hexadecimal digits that name a plain value (SHA-256 of its canonical JSON)."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]
