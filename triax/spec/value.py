"""What do all the values we say have in common: frozen, no unknown keys, a canonical text to take a fingerprint of."""

import hashlib
import json
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

from triax.errors import BadInput
from triax.units import parse_bytes, parse_count


class Value(BaseModel):
    """A frozen value. Unknown keys, wrong types, and numbers that are not finite are errors, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _count(value: Any) -> Any:
    return _parsed(parse_count, value)


def _bytes(value: Any) -> Any:
    return _parsed(parse_bytes, value)


def _parsed(parse: Callable[[str], int], value: Any) -> Any:
    """Return text as the number it says and ``1e6`` as the integer it is; anything else unchanged."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except BadInput as error:
        raise ValueError(str(error)) from None


def as_tuple(value: Any) -> Any:
    """Return a list as a tuple and anything else unchanged: TOML and JSON know no tuples."""
    return tuple(value) if isinstance(value, list) else value


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("text cannot hold the character NUL.")
    return text


Text = Annotated[str, Field(min_length=1), AfterValidator(_without_nul)]
"""Text that is not empty and that a path and a UTF-8 file can hold: pydantic lets no surrogates through here."""

Count = Annotated[int, Field(lt=1 << 63), BeforeValidator(_count)]
"""An integer, or text with a unit of 1000: ``64_000``, ``1e6``, ``"64k"``."""


def _every(value: Any) -> Any:
    if value == "auto":
        return value
    count = _count(value)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < 1 << 63:
        raise ValueError(f'{value!r:.80} is no number of steps: use a whole number of 0 or more, or "auto".')
    return count


Every = Annotated[int | Literal["auto"], PlainValidator(_every)]
"""Steps between two times that something is done, 0 for never; or ``"auto"``: by what it costs."""

LARGEST_SMALL_COUNT: Final = 1 << 20

SmallCount = Annotated[Count, Field(ge=1, le=LARGEST_SMALL_COUNT)]
"""A count of at least one that stays within reason: parts along an axis, sequences of a step."""

ByteCount = Annotated[int, Field(lt=1 << 63), BeforeValidator(_bytes)]
"""An integer number of bytes, or text with a unit: ``"80 GiB"``."""

Texts = Annotated[tuple[Text, ...], BeforeValidator(as_tuple)]
"""Several texts; TOML and JSON write a list."""

Counts = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 63)], ...], BeforeValidator(as_tuple)]
"""Several integers; TOML and JSON write a list."""


def canonical_json(value: Any) -> str:
    """Return the one text that equal plain values share: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def fingerprint(value: Any) -> str:
    """Return 16 hexadecimal digits that name a plain value (SHA-256 of its canonical JSON)."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]
