"""What do tests share that write many small files?"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def ram() -> Iterator[Path]:
    """A folder in memory where there is one: these tests write thousands of small files."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        yield Path(name)
