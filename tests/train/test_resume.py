"""Does a run that was killed come to the same bits as one that was not, and go on in any other layout?"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.runs import Told, saved_weights, series, start, write_corpus
from tests.harness.tolerances import WEIGHT, assert_losses_equal, assert_tensors_equal
from tests.harness.toy import lay
from triax.spec.layout import Layout
from triax.spec.model import ModelSpec
from triax.spec.run import Run

STEPS = 7

LAYOUTS = {
    "stage 0": {"dp_replicate": 2, "zero": 0},
    "stage 1": {"dp_shard": 2, "zero": 1},
    "stage 2": {"dp_shard": 2, "zero": 2},
    "stage 3": {"dp_shard": 2, "zero": 3},
    "hybrid": {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
}


def make_run(folder: Path, precision: str = "fp32") -> Run:
    corpus = write_corpus(folder)
    model = ModelSpec(
        hidden_size=24, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=257, tie_word_embeddings=True,
    )  # fmt: skip
    return Run.model_validate(
        {
            "model": model,
            "data": {
                "train": (str(corpus),), "seq_len": 32, "attend_across_documents": False,
                "cache_dir": str(folder / "cache"),
            },
            "train": {"steps": STEPS, "sequences_per_step": 8},
            "learning_rate": {"peak": 1e-2, "warmup_steps": 2},
            "precision": {"compute": precision, "master": precision, "reduce": precision},
            "checkpoint": {"every_steps": 2, "keep": 2},
            "eval": {"every_steps": 3, "sequences": 5},
            "watch": {"tensorboard": False},
        }
    )  # fmt: skip


def told_of(folder: Path) -> dict[str, list[Any]]:
    return {
        key: series(folder, key) for key in ("step", "train/loss", "train/grad_norm", "data/sample_hash", "eval/loss")
    }


def assert_bits_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_killed_at_any_step_ends_with_the_bits_of_one_that_was_not(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    layout = lay(run, 1, **LAYOUTS[name])
    start(run, layout, tmp_path / "whole")
    expected = told_of(tmp_path / "whole")
    assert expected["step"] == list(range(1, STEPS + 1))
    kills = range(1, STEPS) if name == "stage 2" else (3,)
    for kill in kills:
        folder = tmp_path / f"killed at {kill}"
        assert start(run, layout, folder, killed_at=kill)[0] == Told("killed")
        assert start(run, layout, folder) == [Told()] * layout.world_size
        assert told_of(folder) == expected, f"killed at {kill}"
        assert_bits_equal(saved_weights(folder, run), saved_weights(tmp_path / "whole", run))


@pytest.mark.parametrize(
    "then",
    [
        {"dp_shard": 4, "zero": 3},
        {"dp_replicate": 2, "zero": 0},
        {"dp_shard": 1, "zero": 3},
        {"dp_shard": 8, "zero": 1},
    ],
    ids=["4 ranks stage 3", "2 ranks stage 0", "1 rank", "8 ranks stage 1"],
)
def test_a_run_goes_on_in_another_layout_with_the_same_samples_and_losses(then: dict[str, int], tmp_path: Path) -> None:
    run = make_run(tmp_path)
    first = lay(run, 2, dp_shard=2, zero=2)
    start(run, first, tmp_path / "whole")
    start(run, first, tmp_path / "moved", killed_at=3)
    other: Layout = lay(run, 1, **then)
    assert start(run, other, tmp_path / "moved") == [Told()] * other.world_size
    whole, moved = told_of(tmp_path / "whole"), told_of(tmp_path / "moved")
    assert moved["data/sample_hash"] == whole["data/sample_hash"]
    assert_losses_equal(moved["train/loss"], whole["train/loss"], "fp32")
    held_out = [(one, other) for one, other in zip(moved["eval/loss"], whole["eval/loss"], strict=True) if other]
    assert_losses_equal([one for one, _ in held_out], [other for _, other in held_out], "fp32")
    assert_tensors_equal(
        {name: tensor for name, tensor in saved_weights(tmp_path / "moved", run).items() if "optimizer" not in name},
        {name: tensor for name, tensor in saved_weights(tmp_path / "whole", run).items() if "optimizer" not in name},
        WEIGHT["fp32", "adamw"],
    )


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with_eval = run.model_copy(update={"eval": run.eval.model_copy(update={"every_steps": 1})})
    for zero in (1, 3):
        layout = lay(run, 1, dp_shard=2, zero=zero)
        start(run, layout, tmp_path / f"seldom {zero}")
        start(with_eval, layout, tmp_path / f"often {zero}")
        assert series(tmp_path / f"often {zero}", "train/loss") == series(tmp_path / f"seldom {zero}", "train/loss")
        assert None not in series(tmp_path / f"often {zero}", "eval/loss")


def test_a_checkpoint_of_other_data_is_refused_and_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    layout = lay(run, 1, dp_shard=2, zero=2)
    start(run, layout, tmp_path / "run", killed_at=5)
    before = saved_weights(tmp_path / "run", run)
    (tmp_path / "corpus.jsonl").write_text('{"text": "something else altogether"}\n' * 100)
    (told, _) = start(run, layout, tmp_path / "run")
    assert told.error == "BadInput"
    assert "of a run on other data" in told.message
    assert_bits_equal(saved_weights(tmp_path / "run", run), before)
