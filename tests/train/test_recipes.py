"""Is every recipe a legal run, and do they learn, on the demo's text, and go on in other layouts?"""

import shutil
import sysconfig
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs import Told, series, start
from tests.harness.tolerances import assert_losses_equal
from triax.spec.check import check
from triax.spec.cluster import Cluster
from triax.spec.layout import AXES, Layout
from triax.spec.load import load_run
from triax.spec.resolve import resolve_layout
from triax.spec.run import Run
from triax.watch.experts import LayerLoad, expert_metrics

RECIPES = Path(__file__).parents[2] / "recipes"
EXPERTS, LONG = RECIPES / "experts.toml", RECIPES / "long-sequences.toml"


def layout_of(run: Run, **request: Any) -> Layout:
    """The layout that the recipe asks for, or another one; on as many ranks as its degrees need."""
    if request:
        run = run.model_copy(update={"layout": type(run.layout)(**request)})
    ranks = prod(getattr(run.layout, axis) or 1 for axis in AXES)
    layout = resolve_layout(run, ranks)
    assert check(layout, run, Cluster(cards_per_server=ranks)) == []
    return layout


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda recipe: recipe.stem)
def test_a_recipe_is_legal_as_it_is_and_says_how_it_starts(recipe: Path) -> None:
    layout = layout_of(load_run(recipe))
    assert f"triax train recipes/{recipe.name} --ranks {layout.world_size}" in recipe.read_text()


def on_demo_text(recipe: Path, folder: Path, steps: int, *words: str) -> Run:
    """The recipe on part of the standard library, which is the demo's text, for a few steps."""
    text = Path(sysconfig.get_path("stdlib")) / "json"
    return load_run(
        recipe,
        [
            f"data.train=['{text}']", f"data.cache_dir={folder / 'cache'}", f"train.steps={steps}",
            "learning_rate.warmup_steps=5", "eval.every_steps=0", "watch.tensorboard=false", *words,
        ],
    )  # fmt: skip


@pytest.mark.slow
def test_long_sequences_are_learnt_and_go_on_in_another_layout(tmp_path: Path) -> None:
    """Of a length that four ranks do not divide."""
    words = ("data.seq_len=1021", "checkpoint.every_steps=3")
    run = on_demo_text(LONG, tmp_path, 6, *words)
    layout = layout_of(run)
    assert (layout.cp, layout.cp_method, layout.zero) == (4, "ring", 3)
    assert start(run, layout, tmp_path / "whole") == [Told()] * 4
    assert start(run, layout, tmp_path / "moved", killed_at=4)[0] == Told("killed")
    other = layout_of(run, cp=2, dp_shard=2, zero=1)
    assert start(run, other, tmp_path / "moved") == [Told()] * 4
    whole, moved = (series(tmp_path / name, "train/loss") for name in ("whole", "moved"))
    assert_losses_equal(moved, whole, "fp32")
    assert whole[-1] < 0.85 * whole[0]


def tokens_of(folder: Path) -> list[list[list[float]]]:
    """How many tokens chose each expert: of each step, of each layer."""
    return series(folder, "tokens")


def flips(one: Path, other: Path) -> int:
    """At least so many choices of experts fell otherwise in two runs of the same steps."""
    pairs = zip(tokens_of(one), tokens_of(other), strict=True)
    return sum(
        int(sum(abs(a - b) for a, b in zip(mine, others, strict=True)) / 2)
        for of_step, of_other in pairs
        for mine, others in zip(of_step, of_other, strict=True)
    )


@pytest.fixture
def _tokens_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let metrics.jsonl have the tokens of every expert; ranks are forked and do as this process does."""

    def told(loads: Sequence[LayerLoad]) -> dict[str, Any]:
        return {**expert_metrics(loads), "tokens": [load.tokens for load in loads]}

    monkeypatch.setattr("triax.watch.metrics.expert_metrics", told)


STEPS, STOP = 40, 30


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_tokens_are_told")
def test_experts_learn_stay_busy_and_go_on_over_fewer_ranks(tmp_path: Path) -> None:
    """Under ep x dp_shard x pp. It prints the load with balancing on and off, and the choices that fell otherwise."""
    run = on_demo_text(EXPERTS, tmp_path, STEPS, f"checkpoint.every_steps={STOP}", "train.tokens_per_step=1024")
    layout = layout_of(run)
    assert (layout.pp, layout.dp_shard, layout.ep) == (2, 4, 4)
    whole = tmp_path / "whole"
    assert start(run, layout, whole, killed_at=STOP + 1)[0] == Told("killed")
    shutil.copytree(whole, tmp_path / "stopped")
    assert start(run, layout, whole) == [Told()] * 8
    assert series(whole, "train/loss")[-1] < 0.6 * series(whole, "train/loss")[0]

    words = ("model.experts.router_aux_loss_coef=0", "train.tokens_per_step=1024")
    free = on_demo_text(EXPERTS, tmp_path, STEPS, *words)
    assert start(free, layout, tmp_path / "free") == [Told()] * 8
    loads = {name: sum(series(tmp_path / name, "experts/max_load")[-10:]) / 10 for name in ("whole", "free")}
    print(f"\nlargest load of an expert: {loads['whole']:.2f} balanced, {loads['free']:.2f} left alone")
    assert loads["whole"] - 1 < 0.6 * (loads["free"] - 1)

    for request in ({"pp": 2, "dp_shard": 2, "ep": 2, "zero": 3}, {"pp": 2, "cp": 2, "ep": 2, "zero": 2}, {"zero": 3}):
        moved = tmp_path / str(request)
        shutil.copytree(tmp_path / "stopped", moved)
        other = layout_of(run, **request)
        assert start(run, other, moved) == [Told()] * other.world_size
        flipped = flips(moved, whole)
        print(f"ep 4 -> {other.describe()}: at least {flipped} choices of experts fell otherwise")
        if not flipped:
            assert_losses_equal(series(moved, "train/loss"), series(whole, "train/loss"), "fp32")
        assert flipped < 1e-3 * (STEPS - STOP) * run.tokens_per_step * 2 * 3
