"""Does ``triax dryrun`` say what it should, and refuse what cannot be?"""

import json
from pathlib import Path

import pytest

from tests.cli.typed import make_run
from tests.harness.commands import triax


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


def test_only_what_triax_trains_is_confirmed(capfd: pytest.CaptureFixture[str]) -> None:
    found = triax(["plan", "llama-3.1-8b", "--engine", "megatron", "--confirm"], capfd)
    assert found.code == 2
    assert "use --engine triax" in found.err
