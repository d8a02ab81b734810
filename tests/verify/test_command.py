"""What does ``triax verify`` refuse, and does it work as a user starts it?"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.commands import fork_workers, triax

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("layout", "words", "said"),
    [
        ("tp=3", (), ["tp=3 does not divide num_attention_heads=8", "num_key_value_heads=4", "seq_len=64"]),
        ("tp=8", (), ["tp=8 does not divide num_key_value_heads=4"]),
        ("tp=2", ("model.qk_norm=full",), ["qk_norm"]),
        ("pp=16", (), ["9 layers"]),
        ("pp=2 schedule=DualPipeV stages_per_rank=3", (), ["stages_per_rank=3"]),
        ("schedule=ZBVZeroBubble stages_per_rank=2", (), ["pp=1"]),
        ("pp=2 stage_cuts=[4,4]", (), ["stage_cuts=[4, 4]"]),
        ("pp=2 dp_shard=2 zero=3 schedule=InterleavedZeroBubble", (), ["zero=3"]),
        ("pp=2 schedule=ZBVZeroBubble recompute=selective", (), ["recompute=selective"]),
        ("dp_shard=2 zero=0", (), ["zero=0 shares nothing"]),
        ("dp_shard=5", (), ["does not divide over the 5 data ranks"]),
        ("dp_shard=2 microbatches=5", (), ["microbatches=5"]),
        ("cp=3", (), ["cp=3 cuts a sequence into 6 chunks", "seq_len=64", "use cp=1, 2 or 4"]),
        ("cp=8 cp_method=all_to_all", (), ["cp=8 does not divide num_key_value_heads=4", "cp_method=all_gather"]),
        ("cp=2 cp_method=ring", ("model.sliding_window=5",), ["cp_method=ring", "sliding_window=5"]),
        ("ep=2", (), ["ep=2"]),
        ("pp=two", (), ["layout.pp"]),
        ("tp=3 pp=16 zero=0 dp_shard=5", (), ["tp=3", "pp=16", "zero=0", "5 data ranks"]),
    ],
)
def test_what_cannot_be_trained_is_refused_before_a_process_starts(
    layout: str, words: tuple[str, ...], said: list[str], run_file: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    started = fork_workers(monkeypatch)
    found = triax(["verify", str(run_file), "--layout", layout, *words], capfd)
    assert (found.code, found.out, started) == (2, "", [])
    assert [part for part in said if part not in found.err] == [], found.err
    assert "Traceback" not in found.err


@pytest.mark.parametrize(
    "words",
    [["--steps", "0"], ["--steps", "21"], ["--precision", "bf16"], ["train.stepz=3"], ["nowhere.toml"], ["--json"]],
)
def test_bad_words_are_refused(
    words: list[str],
    run_file: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = fork_workers(monkeypatch)
    target = [] if words[0].endswith(".toml") else [str(run_file)]
    found = triax(["verify", *target, *words], capfd)
    assert (found.code, started) == (2, [])
    assert "Traceback" not in found.err


@pytest.mark.parametrize(("layout", "ranks"), [("", 1), ("tp=4 pp=2", 4), ("dp_replicate=2 zero=0", 2)])
def test_ranks_are_those_of_the_layout_with_degrees_of_two(
    layout: str,
    ranks: int,
    run_file: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = fork_workers(monkeypatch)
    found = triax(["verify", str(run_file), "--layout", layout, "--steps", "1"], capfd)
    assert (found.code, started) == (0, [ranks]), found.err


def test_a_cluster_decides_the_ranks_that_are_left(
    run_file: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 cards, tp=4: data parallelism has the other four, and both become two."""
    started = fork_workers(monkeypatch)
    words = ["cluster.servers=2", "cluster.cards_per_server=8", "layout.tp=4", "--steps", "1"]
    found = triax(["verify", str(run_file), *words], capfd)
    assert (found.code, started) == (0, [4]), found.err
    assert "dp_shard=4 tp=4" in found.out.splitlines()[-1]


def test_the_whole_model_on_its_own_tokens(
    run_file: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork_workers(monkeypatch)
    cache = f"data.cache_dir={run_file.parent / 'cache'}"
    words = ["--full", "--layout", "dp_shard=2", "--steps", "1", "train.sequences_per_step=4", cache]
    found = triax(["verify", str(run_file), *words], capfd)
    assert found.code == 0, found.err
    assert "layers.8.mlp.down_proj.weight" in found.out
    assert "tokens: the run's own" in found.out


def test_it_works_as_a_user_starts_it(run_file: Path) -> None:
    """A process of its own, whose ranks come from torchelastic and its fork server."""
    command = [sys.executable, "-m", "triax", "verify", "run.toml", "--layout", "pp=2", "--steps", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=run_file.parent, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("pp=2 schedule=1F1B trains as one process does")
