"""Which legal values lie nearest to what was asked, and how does a sentence offer them?"""

from collections.abc import Iterable
from math import isqrt


def divisors(number: int) -> list[int]:
    """Return every divisor of a positive number, ascending. Takes sqrt(number) steps."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def multiples(unit: int, wanted: int) -> list[int]:
    """Return the positive multiples of ``unit`` next to ``wanted``: at most one below or equal, and one above."""
    below = wanted // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple]


def nearest(values: list[int], wanted: int) -> list[int]:
    """Return of ascending ``values`` the two up to ``wanted`` that are next to it, and the one above."""
    below = [value for value in values if value <= wanted]
    return below[-2:] + values[len(below) : len(below) + 1]


def either(options: Iterable[object]) -> str:
    """Return the options as a sentence lists them: ``"1, 2 or 4"``."""
    return _listed(options, "or")


def both(facts: Iterable[object]) -> str:
    """Return the facts as a sentence lists them: ``"a, b and c"``."""
    return _listed(facts, "and")


def _listed(items: Iterable[object], word: str) -> str:
    *first, last = map(str, items)
    return f"{', '.join(first)} {word} {last}" if first else last
