"""What does a key of a JSON object from elsewhere hold, and what does a user read when it is of the wrong kind?"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from triax.errors import BadInput
from triax.spec.faults import shown


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Keys that are read as what they must be: text is no number, 1 is not true, 32.0 is no count.

    Every method raises BadInput, naming the origin and the key, where the value is another.
    """

    keys: Mapping[str, Any]
    origin: str
    """Begins every message, such as the path of the file."""
    prefix: str = ""
    """Where the object stands within the file: ``"rope_parameters."``."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that are absent."""

    def value(self, key: str) -> Any:
        """Return what ``key`` says, or its default, or None."""
        return self.keys.get(key, self.defaults.get(key))

    def fault(self, key: str, advice: str) -> BadInput:
        """Return what to raise where the value of ``key`` cannot be."""
        if key not in self.keys:
            return BadInput(f"{self.origin}: {self.prefix}{key} is missing: {advice}.")
        return BadInput(f"{self.origin}: {self.prefix}{key} = {shown(self.keys[key])} cannot be: {advice}.")

    def has(self, key: str) -> bool:
        """Return whether ``key`` has a value: null is as good as nothing."""
        return self.value(key) is not None

    def count(self, key: str, least: int = 1) -> int:
        """Return a whole number of ``least`` or more."""
        value = self.value(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.fault(key, f"use a whole number of {least} or more")
        return value

    def number(self, key: str) -> float:
        """Return a finite number."""
        value = self._finite(self.value(key))
        if value is None:
            raise self.fault(key, "use a finite number")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of finite numbers."""
        listed = self.value(key)
        values = [self._finite(value) for value in listed] if isinstance(listed, list) else [None]
        known = tuple(value for value in values if value is not None)
        if len(known) != len(values):
            raise self.fault(key, "use a list of finite numbers")
        return known

    def flag(self, key: str) -> bool:
        """Return true or false."""
        value = self.value(key)
        if not isinstance(value, bool):
            raise self.fault(key, "use true or false")
        return value

    def words(self, key: str, *legal: str) -> tuple[str, ...]:
        """Return a list of texts, all of them among ``legal`` where there are such."""
        listed = self.value(key)
        if not isinstance(listed, list) or not all(isinstance(word, str) for word in listed):
            raise self.fault(key, "use a list of texts")
        if foreign := [word for word in listed if legal and word not in legal]:
            raise self.fault(key, f"{shown(foreign[0])} is none of {', '.join(legal)}")
        return tuple(listed)

    def section(self, key: str) -> "JsonObject":
        """Return the object below ``key``; null and nothing are an empty one."""
        value = self.value(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.fault(key, "use an object, or null")
        return JsonObject(value, self.origin, f"{self.prefix}{key}.")

    @staticmethod
    def _finite(value: Any) -> float | None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        try:
            number = float(value)
        except OverflowError:
            return None
        return number if math.isfinite(number) else None
