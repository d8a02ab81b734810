"""What holds for every test of the command line: a folder and an environment of its own."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.cli.typed import LAUNCHERS, Told, Typed, typed_here


@pytest.fixture(autouse=True)
def environment_of_its_own() -> Iterator[None]:
    """No launcher's variables, no card, and nothing that a command sets survives the test."""
    with patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
            del os.environ[name]
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Runs a command line in this process, in the test's own folder."""
    monkeypatch.chdir(tmp_path)

    def type_here(*words: object) -> Told:
        return typed_here(capsys, *words)

    return type_here
