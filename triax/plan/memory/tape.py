"""What is the most that is held while tensors come and go in a known order?"""

from collections.abc import Collection


class Tape:
    """Tensors by name, their bytes, and the most bytes that there were at once."""

    def __init__(self, saved: Collection[str] = ()) -> None:
        """``saved`` are names that stay when the code that made them lets go: a backward will read them."""
        self.held: dict[str, float] = {}
        self.now = self.peak = 0.0
        self.saved = saved

    def take(self, name: str, size: float) -> None:
        """Make ``name``, unless it is there already."""
        if name not in self.held:
            self.held[name] = size
            self.now += size
            self.peak = max(self.peak, self.now)

    def leave(self, *names: str) -> None:
        """Let go of ``names``, but of what is saved."""
        for name in names:
            if name not in self.saved:
                self.now -= self.held.pop(name, 0.0)

    def drop(self, *names: str) -> None:
        """Free ``names``, saved or not."""
        for name in names:
            self.now -= self.held.pop(name, 0.0)

    def touch(self, size: float) -> None:
        """Make something of ``size`` that is gone at once."""
        self.peak = max(self.peak, self.now + size)
