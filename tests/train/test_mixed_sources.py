"""Does a run of several sources read the same samples on any number of ranks, and after a stop at any step?"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs import Told, saved_weights, start
from tests.harness.tolerances import assert_losses_equal
from tests.harness.toy import lay
from tests.train.test_resume import STEPS, assert_bits_equal, make_run, told_of
from triax.spec.run import Run


def mixed_run(folder: Path) -> Run:
    """Return a run of three sources: most of one, some of another, and little of one that is read many times."""
    texts = {
        "prose": ("words in a row " * 900, 0.6),
        "code": ("x = y + 1\n" * 900, 0.3),
        "poems": ("oh rose " * 40, 0.1),
    }
    sources: list[dict[str, Any]] = []
    for name, (text, weight) in texts.items():
        (folder / f"{name}.txt").write_text(text)
        sources.append({"name": name, "train": [str(folder / f"{name}.txt")], "weight": weight})
    run = make_run(folder, "fp64")
    data = run.data.model_dump() | {"train": None, "source": sources}
    return Run.model_validate(run.model_dump() | {"data": data})


def held_out_losses(told: dict[str, list[Any]]) -> Sequence[float]:
    return [loss for loss in told["eval/loss"] if loss]


@pytest.mark.parametrize(
    "degrees",
    [{"dp_replicate": 2, "zero": 0}, {"dp_shard": 4, "zero": 3}, {"dp_shard": 8, "zero": 2}, {"pp": 2, "tp": 2}],
    ids=["2 ranks", "4 ranks", "8 ranks", "pp=2 tp=2"],
)
def test_any_number_of_ranks_reads_the_same_mixture(degrees: dict[str, int], tmp_path: Path) -> None:
    run = mixed_run(tmp_path)
    assert start(run, lay(run, 1), tmp_path / "one") == [Told()]
    layout = lay(run, 1, **degrees)
    assert start(run, layout, tmp_path / "many") == [Told()] * layout.world_size
    one, many = told_of(tmp_path / "one"), told_of(tmp_path / "many")
    assert many["data/sample_hash"] == one["data/sample_hash"]
    assert len(set(one["data/sample_hash"])) == STEPS
    assert_losses_equal(many["train/loss"], one["train/loss"], "fp64")
    assert_losses_equal(held_out_losses(many), held_out_losses(one), "fp64")


def test_a_mixture_goes_on_after_a_stop_at_any_step(tmp_path: Path) -> None:
    run = mixed_run(tmp_path)
    layout = lay(run, 1, dp_shard=2, zero=1)
    start(run, layout, tmp_path / "whole")
    expected = told_of(tmp_path / "whole")
    for kill in range(1, STEPS):
        folder = tmp_path / f"killed at {kill}"
        start(run, layout, folder, killed_at=kill)
        assert start(run, layout, folder) == [Told()] * layout.world_size
        assert told_of(folder) == expected, f"killed at {kill}"
        assert_bits_equal(saved_weights(folder, run), saved_weights(tmp_path / "whole", run))
