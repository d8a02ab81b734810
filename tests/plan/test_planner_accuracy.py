"""Does the benchmark of the planner read what is published, predict before it looks, and stay as near as is claimed?

``tests/golden/runs.csv`` is a sample of published runs, each with its source; the calibration has seen them, so that
the bounds here guard against changes and are no claim about runs that it has not seen: docs/planner_accuracy.md is.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import planner_accuracy as accuracy

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden"
MEASURED = ("step_time_s", "tokens_per_s_per_gpu", "peak_memory_gb", "oom")


def report(folder: Path, *options: str, runs: Path = GOLDEN / "runs.csv") -> dict[str, Any]:
    out = folder / "report.json"
    given = ["planner_accuracy.py", "--runs", str(runs), "--json", str(out), *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", given)
        accuracy.main()
    value: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return value


def steps(value: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [
        each for each in value["sets"] if each["quantity"] == "step_s" and each["set"].endswith(kind) and each["used"]
    ]


def weighted(sets: list[dict[str, Any]], key: str) -> float:
    return float(np.average([each[key] for each in sets], weights=[each["used"] for each in sets]))


def test_published_step_times_are_predicted(tmp_path: Path) -> None:
    value = report(tmp_path)
    dense, narrow = steps(value, "/dense"), steps(value, "/dense-narrow")
    assert sum(each["used"] for each in dense + narrow) > 150
    assert (weighted(dense, "median") < 0.05, weighted(dense, "p90") < 0.15) == (True, True)
    assert (weighted(narrow, "median") < 0.06, weighted(narrow, "p90") < 0.18) == (True, True)
    with_null = [each for each in dense if "null_median" in each and each["used"] >= 8]
    assert len(with_null) > 4
    for quantile in ("median", "p90"):
        assert weighted(with_null, quantile) < weighted(with_null, f"null_{quantile}") / 2


def test_families_left_out_are_predicted_too(tmp_path: Path) -> None:
    value = report(tmp_path, "--calibration", "leave-family-out")
    dense = steps(value, "/dense")
    assert weighted(dense, "median") < 0.2
    assert all("leave-family-out" in row["calibration"] for row in value["rows"] if row["quantity"] == "step_s")


def test_the_report_has_the_agreed_shape(tmp_path: Path) -> None:
    value = report(tmp_path)
    assert set(value) == {"rows", "sets", "regret"}
    keys = {"id", "set", "quantity", "predicted", "low", "high", "calibration", "refused"}
    assert all(set(row) == keys for row in value["rows"])
    for row in value["rows"]:
        if row["refused"] is None:
            assert row["low"] <= row["predicted"] <= row["high"]
        else:
            assert row["predicted"] is None
            assert len(row["refused"]) > 20


def test_what_was_measured_changes_no_prediction(tmp_path: Path) -> None:
    raws = accuracy.read(GOLDEN / "runs.csv")[::7]
    for raw in raws:
        other = {**raw, **dict.fromkeys(MEASURED, "7"), "tflops_per_gpu": "9", "mfu_pct": "11"}
        assert accuracy.predict_run(raw, "shipped")[1] == accuracy.predict_run(other, "shipped")[1]


def test_a_row_that_says_too_little_is_refused_with_a_reason() -> None:
    raw = accuracy.read(GOLDEN / "runs.csv")[0]
    for change, reason in (
        ({"gpu": "abacus"}, "its card is not known"),
        ({"framework": "pen and paper"}, "its framework is not known"),
        ({"n_gpus": ""}, "how many cards"),
        ({"tp": "7"}, "does not divide"),
        ({"model": "x", "n_layers": "", "params_b": ""}, "dimensions"),
    ):
        row, made = accuracy.predict_run({**raw, **change}, "shipped")
        assert row is None
        assert all(reason in one.refused for one in made)


def test_torn_rows_never_end_in_a_traceback() -> None:
    raws, chance = accuracy.read(GOLDEN / "runs.csv"), random.Random(0)
    columns = [name for name in raws[0] if name != "id"]
    for _ in range(150):
        raw = dict(chance.choice(raws))
        for name in chance.sample(columns, 3):
            raw[name] = chance.choice(["", "nan", "-1", "0", "1e30", "1000000", "abc", chance.choice(raws)[name]])
        row, made = accuracy.predict_run(raw, "shipped")
        accuracy.read_measurements([raw], [row], [made])
        assert all(one.refused or np.isfinite(one.predicted) for one in made)
