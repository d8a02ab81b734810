"""Does a run whose experts are spread over ranks learn, and do both remedies keep its experts busy?"""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.experts import with_experts
from tests.harness.runs import Told, series, start, write_corpus
from tests.harness.toy import lay
from triax.spec.model import ModelSpec
from triax.spec.run import Run

STEPS, LAST = 80, 15
DENSE = ModelSpec(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=257)

REMEDIES: dict[str, dict[str, Any]] = {
    "a penalty": {"router_aux_loss_coef": 0.05},
    "a bias that follows the load": {
        "scoring_func": "sigmoid", "selection_bias": True, "router_bias_update_speed": 0.02,
    },
}  # fmt: skip


def trained(folder: Path, name: str, **settings: Any) -> Path:
    model = with_experts(DENSE, num_experts=8, moe_intermediate_size=32, **settings)
    run = Run.model_validate(
        {
            "model": model,
            "data": {"train": (str(folder / "corpus.jsonl"),), "seq_len": 64, "cache_dir": str(folder / "cache")},
            "train": {"steps": STEPS, "sequences_per_step": 8},
            "learning_rate": {"peak": 1e-2, "warmup_steps": 5},
            "precision": {"compute": "fp32"},
            "checkpoint": {"every_steps": 0},
            "watch": {"tensorboard": False},
        }
    )
    layout = lay(run, 2, pp=2, dp_shard=2, ep=2, zero=2)
    assert start(run, layout, folder / name) == [Told()] * 4
    return folder / name


def last_load(run: Path) -> float:
    """The largest load of any expert, over the last steps."""
    return sum(series(run, "experts/max_load")[-LAST:]) / LAST


@pytest.mark.slow
def test_experts_stay_busy_with_either_remedy_and_not_without(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    alone = trained(tmp_path, "alone")
    print(f"\nwithout: load {last_load(alone):.2f}, loss {series(alone, 'train/loss')[-1]:.3f}")
    for name, settings in REMEDIES.items():
        balanced = trained(tmp_path, name, **settings)
        losses = series(balanced, "train/loss")
        print(f"{name}: load {last_load(balanced):.2f}, loss {losses[-1]:.3f}")
        assert losses[-1] < 0.6 * losses[0]
        assert last_load(balanced) - 1 < 0.5 * (last_load(alone) - 1)
        assert series(balanced, "experts/idle")[-1] == 0
