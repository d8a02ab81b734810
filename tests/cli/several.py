"""Which run do several servers train in tests, and was it the one run, whatever happened to them?"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.typed import ended, losses, make_run, started, triax
from triax.watch.record import read_events, read_metrics

LOST_AFTER_S = 6.0
WITHIN_S = 30.0
"""In so long a run goes on after a loss was seen."""


def make_several(folder: Path, steps: int, **sections: Any) -> None:
    """Write a run in double precision, in which layouts differ by rounding alone, of steps that take a moment."""
    make_run(
        folder,
        model={"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
        data={"seq_len": 64},
        train={"steps": steps, "sequences_per_step": 12, "timeout_s": 60.0},
        learning_rate={"peak": 1e-3},  # a larger one makes much of the last bit in a hundred steps
        precision={"compute": "fp64", "master": "fp64", "reduce": "fp64"},
        checkpoint={"every_steps": 5},
        recover={"lost_after_s": LOST_AFTER_S, "join_s": 60.0},
        **sections,
    )


def reference(folder: Path) -> Path:
    """Train the run on one rank of one server, where nothing happens, and return its folder."""
    told = ended(started(triax("train", "run.toml", "--ranks", 1, "--run-dir", "reference", "-q"), folder))
    assert (told.code, told.err) == (0, "")
    return folder / "reference"


def assert_same_run(run_dir: Path, alone: Path) -> None:
    """Assert that every step saw the samples that it sees on one rank, and came to the same loss."""
    assert hashes(run_dir) == hashes(alone)
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-9)


def hashes(run_dir: Path) -> list[Any]:
    return [line["data/sample_hash"] for line in read_metrics(run_dir)]


def events(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    """The events of some kinds, in their order."""
    return [event for event in read_events(run_dir) if event["kind"] in kinds]


def step_lines(run_dir: Path) -> list[tuple[float, int]]:
    """When each line of metrics was written, and of which step it is; nothing is superseded."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    values = [json.loads(line) for line in lines if line.strip()]
    return [(value["time"], value["step"]) for value in values]


def newest_step(run_dir: Path) -> int:
    lines = step_lines(run_dir)
    return lines[-1][1] if lines else 0
