"""Does a run go on where it stopped in a layout that cuts everything another way?

It stops at pp=2 x dp_shard=2 x tp=2 and goes on over data ranks alone, over tensor and interleaved stages, on one
process: a checkpoint knows no layout. Embeddings are tied, so that pipelines hold them twice; sizes divide by nothing,
and the norms of heads have fewer numbers than there are ranks.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs import Told, saved_weights, start
from tests.harness.tolerances import WEIGHT, assert_losses_equal, assert_tensors_equal
from tests.harness.toy import lay
from tests.train.test_resume import STEPS, assert_bits_equal, make_run, told_of
from triax.spec.check import check
from triax.spec.layout import Layout
from triax.spec.model import ModelSpec
from triax.spec.run import Run

MODEL = ModelSpec(
    hidden_size=20, intermediate_size=37, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4, head_dim=4,
    vocab_size=257, tie_word_embeddings=True, qk_norm="head",
)  # fmt: skip

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2 x dp2 x tp2": {"pp": 2, "dp_shard": 2, "tp": 2, "zero": 2},
    "dp8": {"dp_shard": 8, "zero": 3},
    "tp4 x pp2 interleaved": {"tp": 4, "pp": 2, "zero": 3, "schedule": "Interleaved1F1B", "stages_per_rank": 2},
    "one process": {"dp_shard": 1, "zero": 3},
    "cp2 x tp2 x dp2": {"cp": 2, "tp": 2, "dp_shard": 2, "zero": 3, "cp_method": "ring"},
    "cp4 x pp2": {"cp": 4, "pp": 2, "zero": 0, "cp_method": "all_to_all"},
    "V": {"pp": 2, "dp_shard": 2, "zero": 1, "schedule": "DualPipeV", "stages_per_rank": 2},
    "dp2 x pp2 x tp2 outermost first": {
        "pp": 2, "dp_replicate": 2, "tp": 2, "zero": 0, "order": ("tp", "cp", "dp_shard", "dp_replicate", "pp"),
        "stage_cuts": (2, 3),
    },
}  # fmt: skip
KILLED_AT = 3


def run_in(folder: Path, precision: str = "fp64") -> Run:
    return make_run(folder, precision).model_copy(update={"model": MODEL})


def layout_of(run: Run, name: str) -> Layout:
    layout = lay(run, 1, **LAYOUTS[name])
    assert check(layout, run) == []
    return layout


class Trained:
    """Two runs of one layout: one that was never stopped, and one that died."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.run = folder, run_in(folder)
        self.layout = layout_of(self.run, name)
        assert start(self.run, self.layout, folder / "whole") == [Told()] * self.layout.world_size
        assert start(self.run, self.layout, folder / "killed", killed_at=KILLED_AT)[0] == Told("killed")

    def assert_goes_on(self, name: str, to: Path) -> Path:
        """Go on from a copy of the dead run in another layout and compare with the one that was never stopped."""
        shutil.copytree(self.folder / "killed", to)
        layout = layout_of(self.run, name)
        assert start(self.run, layout, to) == [Told()] * layout.world_size
        whole, moved = told_of(self.folder / "whole"), told_of(to)
        assert moved["step"] == whole["step"] == list(range(1, STEPS + 1))
        assert moved["data/sample_hash"] == whole["data/sample_hash"]
        for key in ("train/loss", "train/grad_norm"):
            assert_losses_equal(moved[key], whole[key], "fp64")
        assert_losses_equal(*([loss for loss in told["eval/loss"] if loss] for told in (moved, whole)), "fp64")
        assert_tensors_equal(
            saved_weights(to, self.run), saved_weights(self.folder / "whole", self.run), WEIGHT["fp64", "adamw"]
        )
        return to


@pytest.fixture(scope="module")
def cut_in_three(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("cut"), "pp2 x dp2 x tp2")


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("folded"), "V")


@pytest.mark.parametrize(
    "name",
    [
        "dp8",
        pytest.param("tp4 x pp2 interleaved", marks=pytest.mark.slow),
        "one process",
        "cp2 x tp2 x dp2",
        pytest.param("cp4 x pp2", marks=pytest.mark.exhaustive),
        pytest.param("V", marks=pytest.mark.exhaustive),
        pytest.param("dp2 x pp2 x tp2 outermost first", marks=pytest.mark.exhaustive),
    ],
)
def test_it_goes_on_in_another_layout(name: str, cut_in_three: Trained, tmp_path: Path) -> None:
    cut_in_three.assert_goes_on(name, tmp_path / "moved")


@pytest.mark.parametrize("name", ["one process", pytest.param("dp8", marks=pytest.mark.exhaustive)])
def test_a_v_that_has_the_tied_embedding_twice_goes_on_in_another_layout(
    name: str, folded: Trained, tmp_path: Path
) -> None:
    folded.assert_goes_on(name, tmp_path / "moved")


def test_the_same_layout_comes_to_the_same_bits(cut_in_three: Trained, tmp_path: Path) -> None:
    again = cut_in_three.assert_goes_on("pp2 x dp2 x tp2", tmp_path / "again")
    assert_same_story(again, cut_in_three)


def test_the_same_v_comes_to_the_same_bits(folded: Trained, tmp_path: Path) -> None:
    assert_same_story(folded.assert_goes_on("V", tmp_path / "again"), folded)


def assert_same_story(folder: Path, trained: Trained) -> None:
    assert told_of(folder) == told_of(trained.folder / "whole")
    assert_bits_equal(saved_weights(folder, trained.run), saved_weights(trained.folder / "whole", trained.run))
