"""How are sizes written and read: ``64k`` tokens, ``1.5 GiB``, ``12.3 ms``?

Counts use powers of 1000 (``64k`` tokens is 64,000); bytes use the IEC names for powers of 1024.
"""

import re
from fractions import Fraction
from typing import Final

from triax.errors import BadInput

_COUNT_SUFFIXES: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_BYTE_SUFFIXES: Final = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_LONGEST: Final = 100
"""Characters of a size; more is some other text, and Python reads no number of more than 4300 digits."""
_NUMBER_WITH_UNIT: Final = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*([a-zA-Z]*)\s*")


def _parse(text: str, suffixes: dict[str, int], what: str, examples: str) -> int:
    match = _NUMBER_WITH_UNIT.fullmatch(text) if len(text) <= _LONGEST else None
    factor = suffixes.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        said = repr(text[:_LONGEST])
        raise BadInput(f"{said} is not a {what}: write a number with an optional unit, such as {examples}.")
    # Exact: in floating point 1.001k would be 1000.9999999999999 and no whole number.
    value = Fraction(match.group(1).replace("_", "")) * factor
    if value.denominator != 1 or value >= 2**63:
        raise BadInput(f"{text!r} is not a whole {what} below 2^63.")
    return int(value)


def parse_count(text: str) -> int:
    """Return the count that ``text`` says, such as ``"64k"`` -> 64000; raise BadInput otherwise."""
    return _parse(text, _COUNT_SUFFIXES, "count", "512, 64k or 1.5M")


def parse_bytes(text: str) -> int:
    """Return the bytes that ``text`` says, such as ``"80 GiB"`` -> 85899345920; raise BadInput otherwise."""
    return _parse(text, _BYTE_SUFFIXES, "number of bytes", "80 GiB, 512 MB or 4096")


def format_count(value: float) -> str:
    """Return a short form of a count: ``1234567`` -> ``"1.23M"``."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:  # what three digits would round up to the next suffix belongs to it
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def format_bytes(value: float) -> str:
    """Return bytes in the largest IEC unit that keeps the number at or above one: ``"1.50 GiB"``."""
    for suffix, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= size:
            return f"{value / size:.2f} {suffix}"
    return f"{value:.0f} B"


def format_seconds(value: float) -> str:
    """Return a duration people read at a glance: ``"850 ms"``, ``"12.3 s"``, ``"4 min 05 s"``, ``"2 h 07 min"``."""
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    if value < 59.95:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
