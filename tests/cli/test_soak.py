"""Is a run that is killed again and again the same as one that is left in peace, to the last bit?

Any rank, two at once, the process that they are forked from, and the command itself, at any moment: in a step, in a
save, in a start. A command that was killed is started again, as a scheduler would.
"""

from pathlib import Path

import pytest
import torch

from tests.cli.typed import ended, losses, make_run, started, triax
from tests.harness.kills import Soak
from tests.harness.runs import saved_weights
from triax.spec.load import load_run

QUICK = {"dp_shard=2 zero=3": 2, "pp=2": 2}
"""Layouts with their ranks; ten kills together."""
LAYOUTS = {
    "dp_shard=2 zero=3": 2, "dp_shard=2 zero=1": 2, "dp_replicate=2 zero=0": 2, "tp=2": 2, "pp=2": 2, "cp=2": 2,
    "pp=2 tp=2": 4, "dp_shard=2 tp=2 zero=2": 4,
}  # fmt: skip


def soak(folder: Path, layout: str, ranks: int, num_kills: int, seed: int) -> None:
    make_run(
        folder,
        model={"num_hidden_layers": 2},
        train={"steps": Soak.steps(num_kills), "sequences_per_step": 8},
        checkpoint={"every_steps": 4},
        guard={"check_initial_loss": False},
        # Kills that come from outside repeat themselves by chance, and with luck no step is gained between many.
        recover={"same_fault": 1000, "max_restarts": 1000, "backoff_s": 0.0},
    )
    words = ("train", "run.toml", "--ranks", ranks, "--layout", layout, "-q", "--run-dir")
    told = ended(started(triax(*words, "reference"), folder))
    assert (told.code, told.err) == (0, "")
    killed = Soak(triax(*words, "killed"), folder, folder / "killed", num_kills, seed)
    killed.run()
    assert killed.left_over() == []
    assert losses(folder / "killed") == losses(folder / "reference")
    run = load_run(folder / "run.toml")
    weights, expected = (saved_weights(folder / name, run) for name in ("killed", "reference"))
    assert weights.keys() == expected.keys()
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []
    assert killed.lost_more_than_since_the_checkpoint() == []


@pytest.mark.parametrize("layout", QUICK)
def test_ten_kills_change_no_bit(layout: str, tmp_path: Path) -> None:
    soak(tmp_path, layout, QUICK[layout], num_kills=5, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_hundred_kills_change_no_bit(layout: str, tmp_path: Path) -> None:
    soak(tmp_path, layout, LAYOUTS[layout], num_kills=200 // len(LAYOUTS), seed=2)
