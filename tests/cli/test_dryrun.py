"""Does ``triax dryrun`` say what it should, and refuse what cannot be?"""

import json
from pathlib import Path

import pytest

from tests.cli.typed import make_run
from tests.harness.commands import triax
from triax.spec.cluster import Cluster
from triax.spec.layout import Layout
from triax.spec.load import load_run
from triax.spec.plan import make_plan


def test_a_rank_of_a_cluster_that_is_not_here(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, model={"num_hidden_layers": 2})
    words = ["--layout", "pp=2 dp_shard=2 microbatches=2", "--world", "4", "--rank", "3", "--json", str(tmp_path / "d")]
    found = triax(["dryrun", str(run), *words], capfd)
    assert (found.code, found.err) == (0, "")
    assert "rank 3 (pp=1 dp_shard=1) of pp=2 dp_shard=2" in found.out
    assert "stage 1 with layer 1" in found.out
    said = json.loads((tmp_path / "d").read_text())
    assert said["peak_bytes"] == sum(said["peak"]["held"].values())
    assert said["actions"] == ["1F0", "1B0", "1F1", "1B1"]
    assert {each["axis"] for each in said["collectives"]} >= {"pp", "dp_shard", "all"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layout", "tp=3", "--world", "3"], "tp=3 does not divide num_attention_heads=2"),
        (["--rank", "1"], "there is no rank 1"),
        (["--layout", "dp_shard=2", "--world", "9"], "--world 9 is no whole number of servers"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    text = run.read_text()
    if "9" in words:
        run.write_text(text[: text.index("[cluster]")])
    found = triax(["dryrun", str(run), *words], capfd)
    assert (found.code, found.out) == (2, "")
    assert said in found.err
    assert "Traceback" not in found.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["llama-3.1-8b", "--engine", "megatron"], "use --engine triax"),
        (["deepseek-v3", "--cluster", "64x8xh100"], "triax does not train deepseek-v3"),
        (["llama-3.1-8b", "--for", "finetune"], "leave out --for finetune"),
    ],
)
def test_only_what_triax_trains_is_confirmed(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = triax(["plan", *words, "--confirm"], capfd)
    assert found.code == 2
    assert said in found.err


def test_a_plan_is_taken_as_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = load_run(make_run(tmp_path, model={"num_hidden_layers": 2}), ())
    plan = make_plan(run, Cluster(cards_per_server=2), Layout(dp_shard=2, microbatches=2))
    file = tmp_path / "plan.json"
    file.write_text(plan.model_dump_json())
    assert triax(["dryrun", str(file), "--rank", "1"], capfd).code == 0
    told = triax(["dryrun", str(file), "--world", "4"], capfd)
    assert (told.code, "is a plan and is taken as it is" in told.err) == (2, True)
    file.write_text(plan.model_copy(update={"cluster": Cluster(cards_per_server=4)}).model_dump_json())
    told = triax(["dryrun", str(file)], capfd)
    assert told.code == 2
    assert "Traceback" not in told.err
