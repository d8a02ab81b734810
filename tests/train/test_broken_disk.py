"""Does a run whose disk fails come to the same losses and, once the disk is well, to the same bits?"""

import errno
import os
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.checkpoint.crash import NAMES
from tests.harness.runs import Told, saved_weights, series, start
from tests.harness.toy import lay
from tests.train.test_resume import STEPS, assert_bits_equal, make_run
from triax.checkpoint import operations


def failing_sometimes(name: str, how_often: float) -> Any:
    """The operation as a broken disk does it, with other failures on every rank."""
    original = getattr(operations, name)
    chance = random.Random(name)

    def do(*args: Any) -> Any:
        rank = int(os.environ.get("RANK", "0"))
        for _ in range(rank):
            chance.random()
        # The folder itself is made at the start of the run, where a failure is the user's to mend.
        if "step-" in str(args[0]) + os.path.realpath(f"/proc/self/fd/{args[0]}") and chance.random() < how_often:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(*args)

    return do


@pytest.mark.parametrize("how_often", [0.05, 1.0], ids=["now and then", "always"])
def test_training_goes_on_over_a_broken_disk(how_often: float, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run = run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update={"every_steps": 1})})
    layout = lay(run, 1, dp_shard=2, zero=3)
    start(run, layout, tmp_path / "whole")
    with patch.multiple(operations, **{name: failing_sometimes(name, how_often) for name in NAMES}):
        told = start(run, layout, tmp_path / "run")
    assert series(tmp_path / "run", "step") == list(range(1, STEPS + 1))
    assert series(tmp_path / "run", "train/loss") == series(tmp_path / "whole", "train/loss")
    if how_often == 1.0:
        assert told[0].error == "TriaxError"
        assert "could not be saved" in told[0].message
        assert "input/output error" in told[0].message
    assert start(run, layout, tmp_path / "run") == [Told(), Told()]
    assert_bits_equal(saved_weights(tmp_path / "run", run), saved_weights(tmp_path / "whole", run))
