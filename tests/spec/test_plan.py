"""Does a plan come back from its file as it was, and is one that was edited refused?"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.spec.run_files import Said, make_run, whole
from triax.errors import BadInput
from triax.spec.cluster import Cluster
from triax.spec.layout import Layout
from triax.spec.load import load_plan
from triax.spec.plan import Alternative, Plan, Prediction, make_plan, plan_as_json
from triax.spec.run import FORMAT_VERSION, Run


def full_plan() -> Plan:
    """A plan with everything in it that a planner may say."""
    run = Run.model_validate(whole())
    assert run.cluster is not None
    plan = make_plan(run, run.cluster, Layout(dp_shard=16, zero=2, stage_cuts=(3,), recompute="selective"))
    seconds = Prediction(value=0.25, low=0.2, high=0.3, formula="compute_s + comms_s")
    other = Alternative(layout=Layout(dp_shard=8), predictions={"step_s": seconds}, reason="slower")
    said: Said = {"predictions": {"step_s": seconds}, "alternatives": (other,), "refusals": ("tp=16: no",)}
    return plan.model_copy(update=said)


def written(folder: Path, said: Any) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps(said), encoding="utf-8")
    return path


@pytest.mark.parametrize("plan", [make_plan(make_run(), Cluster(), Layout(microbatches=16)), full_plan()])
def test_a_plan_comes_back_as_it_was(plan: Plan, tmp_path: Path) -> None:
    assert load_plan(written(tmp_path, plan_as_json(plan))) == plan
    # Workers get theirs as text, by pydantic's own reader, which is laxer than a run file's.
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_a_plan_says_its_version_and_its_fingerprint() -> None:
    said = plan_as_json(full_plan())
    assert said["format_version"] == FORMAT_VERSION
    assert said["fingerprint"] == Run.model_validate(whole()).fingerprint


def edit_fingerprint(said: Said) -> None:
    said["fingerprint"] = "0" * 16


def edit_mathematics(said: Said) -> None:
    said["run"]["train"]["seed"] += 1


def edit_version(said: Said) -> None:
    said["format_version"] = FORMAT_VERSION + 1
    said["new_in_that_version"] = True


def edit_key(said: Said) -> None:
    said["alternatives"][0]["layout"]["tpp"] = 2


def edit_prediction(said: Said) -> None:
    said["predictions"]["step_s"] = "fast"


def edit_layout(said: Said) -> None:
    said["layout"]["order"] = ["pp"]


def edit_length(said: Said) -> None:
    said["run"]["model"]["max_position_embeddings"] = 8


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (edit_fingerprint, "the plan was made for run 0000000000000000"),
        (edit_mathematics, "it was edited; make the plan again"),
        (edit_version, f"format_version={FORMAT_VERSION + 1}, and this version of triax reads up to {FORMAT_VERSION}"),
        (edit_key, "unknown key 'alternatives.0.layout.tpp': did you mean alternatives.0.layout.tp?"),
        (edit_prediction, "predictions.step_s = 'fast' cannot be"),
        (edit_layout, "layout.order: ['pp'] must name each of"),
        (edit_length, "run: data.seq_len=32 is longer than"),
    ],
)
def test_an_edited_plan_is_refused(edit: Callable[[Said], None], words: str, tmp_path: Path) -> None:
    said = plan_as_json(full_plan())
    edit(said)
    with pytest.raises(BadInput) as refusal:
        load_plan(written(tmp_path, said))
    assert words in str(refusal.value)
    assert str(refusal.value).startswith(str(tmp_path / "plan.json"))


def test_where_it_runs_may_be_edited(tmp_path: Path) -> None:
    """Resuming elsewhere is normal: the fingerprint does not hold the layout, the cluster or paths."""
    said = plan_as_json(full_plan())
    said["cluster"]["servers"] = 4
    said["layout"]["dp_shard"] = 32
    said["run"]["data"]["train"] = ["/mnt/corpus.txt"]
    assert load_plan(written(tmp_path, said)).layout.dp_shard == 32


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON: Expecting value at line 1"),
        ("{", "not valid JSON"),
        ("[1]", "holds a JSON list, and must hold an object"),
        ("null", "holds a JSON NoneType, and must hold an object"),
        ("{}", "fingerprint is missing"),
        ('{"fingerprint": NaN}', "not valid JSON: NaN is no number"),
        ('{"fingerprint": 1e999}', "fingerprint = inf cannot be"),
        ('{"a":' * 50_000, "not valid JSON"),
        ("[" * 50_000, "not valid JSON"),
        ("9" * 5000, "not valid JSON"),
        ('{"run": ' + '{"a":' * 900 + "1" + "}" * 901, "unknown key 'run.a'"),
        ('{"run": ' + "[" * 900 + "]" * 900 + "}", "run = [[[["),
    ],
)
def test_what_is_no_plan_is_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput) as refusal:
        load_plan(path)
    assert words in str(refusal.value)
    assert len(str(refusal.value)) < 3000
