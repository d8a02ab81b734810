"""How does a long test run go on after it was cut off? With ``--go-on`` what passed on the same sources is left out.

Names of passed tests are appended to a file in pytest's cache folder, which is named by a digest of every file that a
result depends on: one changed line, and all run again.
"""

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--go-on``."""
    parser.addoption("--go-on", action="store_true", help="leave out tests that passed on the same sources before")


def pytest_configure(config: pytest.Config) -> None:
    """Watch what passes where ``--go-on`` was said."""
    if config.getoption("--go-on"):
        config.pluginmanager.register(_Passed(config.rootpath), "going-on")


def digest_of(root: Path) -> str:
    """Return the digest of every Python, TOML and JSON file of the project, and of torch's version."""
    digest = hashlib.sha256(version("torch").encode())
    for path in sorted(_sources(root)):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _sources(root: Path) -> Iterator[Path]:
    yield from (path for path in (root / "pyproject.toml", root / "constraints.txt") if path.exists())
    for room in ("triax", "tests", "demo", "benchmarks", "recipes"):
        yield from (path for path in (root / room).rglob("*") if path.suffix in (".py", ".toml", ".json"))


class _Passed:
    def __init__(self, root: Path) -> None:
        path = root / ".pytest_cache" / "passed" / digest_of(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._names = set(path.read_text().splitlines()) if path.exists() else set()
        # Opened once: a result is reported while what its test has patched, such as a full disk, is still in place.
        self._file = path.open("a", buffering=1)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = [item for item in items if item.nodeid in self._names]
        items[:] = [item for item in items if item.nodeid not in self._names]
        config.hook.pytest_deselected(items=done)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._file.write(f"{report.nodeid}\n")

    def pytest_unconfigure(self) -> None:
        self._file.close()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._names:
            terminalreporter.write_line(f"{len(self._names)} tests had passed on the same sources before (--go-on)")
