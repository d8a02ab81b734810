"""Does a run with experts go on where it stopped, its experts spread over other ranks?

From ep=4 to 2 and to 1, and over parts of sequences, with biases that follow the load and penalties that do not know
how a step is cut. In fp64 no route flips on rounding, so that the load of every expert in every step is the same to the
token.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness.experts import DEEPSEEK, with_experts
from tests.harness.runs import Told, saved_weights, series, start
from tests.harness.tolerances import WEIGHT, assert_losses_equal, assert_tensors_equal
from tests.harness.toy import lay
from tests.train.test_resume import STEPS, assert_bits_equal, make_run, told_of
from triax.spec.check import check
from triax.spec.layout import Layout
from triax.spec.model import ModelSpec
from triax.spec.run import Run

MODEL = ModelSpec(
    hidden_size=20, intermediate_size=37, num_hidden_layers=3, num_attention_heads=4, head_dim=4, vocab_size=257,
    tie_word_embeddings=True,
)  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep4": {"dp_shard": 4, "ep": 4, "zero": 3},
    "ep2 x pp2": {"pp": 2, "dp_shard": 2, "ep": 2, "zero": 1},
    "ep2 in tp": {"dp_shard": 2, "tp": 2, "ep": 2, "zero": 2},
    "ep4 over cp": {"cp": 2, "tp": 2, "ep": 4, "zero": 3, "cp_method": "all_to_all"},
    "one process": {"zero": 3},
}
LOADS = ("experts/max_load", "experts/idle", "experts/max_load/layer_1", "experts/max_load/layer_2")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A run at ep=4 that was never stopped, and one that died."""
    folder = tmp_path_factory.mktemp("experts")
    run = make_run(folder, "fp64").model_copy(update={"model": with_experts(MODEL, **DEEPSEEK)})
    layout = layout_of(run, "ep4")
    assert start(run, layout, folder / "whole") == [Told()] * 4
    assert start(run, layout, folder / "killed", killed_at=3)[0] == Told("killed")
    return folder, run


def layout_of(run: Run, name: str) -> Layout:
    layout = lay(run, 1, **LAYOUTS[name])
    assert check(layout, run) == []
    return layout


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_goes_on_over_other_ranks(name: str, stopped: tuple[Path, Run], tmp_path: Path) -> None:
    folder, run = stopped
    moved = tmp_path / "moved"
    shutil.copytree(folder / "killed", moved)
    layout = layout_of(run, name)
    assert start(run, layout, moved) == [Told()] * layout.world_size
    told, expected = told_of(moved), told_of(folder / "whole")
    assert told["step"] == list(range(1, STEPS + 1))
    for key in ("train/loss", "train/grad_norm"):
        assert_losses_equal(told[key], expected[key], "fp64")
    for key in LOADS:
        assert series(moved, key) == series(folder / "whole", key), "a route has flipped"
    weights, whole = saved_weights(moved, run), saved_weights(folder / "whole", run)
    if name == "ep4":
        assert_bits_equal(weights, whole)
    assert_tensors_equal(weights, whole, WEIGHT["fp64", "adamw"])
    assert "optimizer.exp_avg.layers.1.mlp.experts.up_proj" in weights
    assert "optimizer.exp_avg.layers.1.mlp.gate.e_score_correction_bias" not in weights
    assert weights["layers.1.mlp.gate.e_score_correction_bias"].abs().max() > 0
