"""How many ranks does a command start by itself, and how many may it be asked for?"""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.typed import Typed, make_run, refuse
from triax.cli import start


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /dev with four cards, and the nodes that every driver makes beside them."""
    dev = tmp_path / "dev"
    dev.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (dev / name).touch()

    def moved(*words: Any) -> Path:
        return (
            dev if words == ("/dev",) else tmp_path / "nothing" if words[0].startswith("/proc/driver") else Path(*words)
        )

    monkeypatch.setattr(start, "Path", moved)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return dev


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (None, 4), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("0", 1), ("2, 3", 2), ("0,-1,1", 1), ("GPU-ab,GPU-cd", 2),
        ("MIG-a,MIG-b,MIG-c,MIG-d,MIG-e", 5),
    ],
)  # fmt: skip
def test_cards_that_are_visible(said: str | None, expected: int, cards: Path) -> None:
    if said is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = said
    assert start._num_cards() == expected


def test_no_cards_where_there_is_no_driver(cards: Path) -> None:
    for node in cards.iterdir():
        node.unlink()
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    assert start._num_cards() == 0


def test_more_ranks_than_cards(cards: Path, tmp_path: Path, here: Typed) -> None:
    make_run(tmp_path, train={"sequences_per_step": 8})
    refuse(here("train", "run.toml", "--ranks", 8), "8 ranks are too many for this server of 4 cards")
