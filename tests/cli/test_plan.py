"""Does ``triax plan`` answer in seconds without torch, in text, JSON, plan.json and other tools' words, and refuse what
cannot be in one sentence?"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.typed import ROOT, Typed, environment, losses, make_run, refuse
from triax.spec.check import check
from triax.spec.load import load_plan


def test_the_page(here: Typed) -> None:
    told = here("plan", "llama-3.1-70b", "--cluster", "8x8xh100", "--token-budget", "1T")
    assert (told.code, told.err) == (0, "")
    for part in (
        "the layout",
        "where a step's time goes",
        "what the fullest card holds",
        "why",
        "what else there is",
        "what cannot be",
        "layouts were compared",
        "in 80 % of cases",
        "1T tokens take",
        "Across servers",
    ):
        assert part in told.out
    assert "\x1b" not in told.out
    assert max(map(len, told.out.splitlines())) <= 130


def test_help_names_what_there_is(here: Typed) -> None:
    told = here("plan", "--help")
    assert (told.code, told.err) == (0, "")
    assert told.out.replace("\n", "").isascii()
    for word in ("--cluster", "--token-budget", "--fewest-cards", "--export", "--json", "--for", "--layout"):
        assert word in told.out


@pytest.mark.parametrize(
    "words",
    [
        ("llama-3.1-405b", "--cluster", "2048x8xh100", "--seq-len", "8192"),
        ("deepseek-v3", "--cluster", "2048x8xh100", "--tokens-per-step", "64M"),
    ],
)
def test_no_torch_and_seconds_for_sixteen_thousand_cards(words: tuple[str, ...]) -> None:
    """Processor time of the whole command, since other work on the machine is not its own."""
    code = (
        "import sys, time; from triax.cli import run; code = run(sys.argv[1:]);"
        "heavy = sorted({'torch', 'transformers', 'scipy'} & set(sys.modules));"
        "print(*heavy, code, time.process_time(), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "plan", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    *modules, exit_code, seconds = done.stderr.split()
    assert (modules, exit_code) == ([], "0"), done.stderr
    assert float(seconds) < 4.0
    assert "layouts were compared" in done.stdout


def as_json(here: Typed, *words: object) -> Any:
    told = here(*words, "--json", "-")
    assert (told.code, told.err) == (0, "")
    return json.loads(told.out)


def test_json_is_whole_and_the_same_each_time(here: Typed) -> None:
    words = ("plan", "qwen3-8b", "--cluster", "2x8xh100")
    said = as_json(here, *words)
    assert said == as_json(here, *words)
    assert sum(said["seconds"].values()) == pytest.approx(said["predictions"]["step_s"]["value"])
    assert said["model"]["parameters"] > 8e9
    assert said["layout"]["tp"] >= 1
    assert said["reasons"]
    assert said["assumed"]


def test_json_goes_into_a_file_beside_the_page(here: Typed, tmp_path: Path) -> None:
    told = here("plan", "llama-3.2-1b", "--json", "answer.json")
    assert "why" in told.out
    assert json.loads((tmp_path / "answer.json").read_text())["engine"] == "triax"


def test_a_model_that_triax_does_not_train_is_planned_and_said_so(here: Typed) -> None:
    told = here("plan", "deepseek-v3", "--cluster", "64x8xh200", "--tokens-per-step", "16M")
    assert told.code == 0
    assert "by megatron" in told.out
    assert "ep=" in told.out
    assert "triax does not train this" in told.out


def test_inference(here: Typed) -> None:
    told = here("plan", "llama-3.1-70b", "--for", "inference", "--cluster", "1x8xh100", "--context", "8k")
    assert told.code == 0
    assert "2 cards hold one copy" in told.out
    rows = as_json(here, "plan", "llama-3.1-70b", "--for", "inference", "--precision", "fp8")["servings"]
    assert rows[0]["usd_per_million_tokens"] > rows[-1]["usd_per_million_tokens"]


def test_the_fewest_cards_and_a_date(here: Typed) -> None:
    said = as_json(here, "plan", "llama-3.1-70b", "--cluster", "1x8xh100", "--fewest-cards")
    assert [row["cards"] for row in said["sizes"] if row["is_chosen"]] in ([16], [24], [32])
    words = ("plan", "llama-3.1-8b", "--token-budget", "1T", "--tokens-per-step", "4M", "--days", "60")
    said = as_json(here, *words)
    chosen = next(row for row in said["sizes"] if row["is_chosen"])
    assert chosen["days"] <= 60
    assert all(row["days"] > 60 for row in said["sizes"] if row["cards"] < chosen["cards"])


def test_the_largest_that_fits(here: Typed) -> None:
    assert as_json(here, "plan", "llama-3.1-8b", "--longest-sequence")["most"] > 8192
    assert as_json(here, "plan", "llama-3.1-8b", "--deepest")["most"] > 32


def test_adapters_fit_where_all_weights_do_not(here: Typed) -> None:
    whole = here("plan", "llama-3.1-8b", "--cluster", "1x1xh100")
    refuse(whole, "is missing", "the smallest cluster of such cards that would do is")
    assert here("plan", "llama-3.1-8b", "--cluster", "1x1xh100", "--for", "finetune").code == 0


@pytest.mark.parametrize("tool", ["megatron", "torchtitan"])
def test_export(tool: str, here: Typed) -> None:
    told = here("plan", "llama-3.1-70b", "--cluster", "8x8xh100", "--export", tool)
    assert told.code == 0
    assert told.out.startswith("#")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("llama-3.1-9b",), "did you mean llama-3.1-8b"),
        (("llama-3.1-8b", "--cluster", "1x8xh10"), "did you mean h100"),
        (("llama-3.1-8b", "--cluster", "0x8xh100"), "is no cluster"),
        (("llama-3.1-8b", "--cluster", "2x99xh100"), "at most 8 cards"),
        (("llama-3.1-8b", "--cluster", "37x1xh100", "--layout", "cp=1"), "leaves no layout of 37 x 1 h100: use cp=37"),
        (("mixtral-8x7b", "--cluster", "37x1xh200"), "no way to cut"),
        (("llama-3.1-8b", "--layout", "tp=3"), "use tp=1, 2, 4 or 8"),
        (("llama-3.1-8b", "--layout", "stage_cuts=3"), "stage_cuts"),
        (("llama-3.1-8b", "--seq-len", "-5"), "--seq-len"),
        (("llama-3.1-8b", "--seq-len", "0"), "use 1 or more"),
        (("llama-3.1-8b", "--seq-len", "nan"), "--seq-len"),
        (("llama-3.1-8b", "--tokens-per-step", "10"), "less than one sequence"),
        (("llama-3.1-8b", "--token-budget", "1e99"), "--token-budget"),
        (("llama-3.1-8b", "--days", "3"), "--token-budget 1T"),
        (("llama-3.1-8b", "--days", "-1", "--token-budget", "1T"), "use a number above 0"),
        (("llama-3.1-8b", "--days", "nan", "--token-budget", "1T"), "use a number above 0"),
        (("llama-3.1-8b", "--days", "0.001", "--token-budget", "15T"), "none fits"),
        (("llama-3.1-8b", "--usd-per-card-hour", "-1"), "use more than 0"),
        (("llama-3.1-8b", "--usd-per-card-hour", "inf"), "finite"),
        (("llama-3.1-8b", "--usd-per-card-hour", "1e99"), "use 1e-06 to 1e+06"),
        (("llama-3.1-8b", "--seq-len", "1e15"), "use 1 to"),
        (("llama-3.1-8b", "--longest-sequence", "--layout", "tp=3"), "use tp=1, 2, 4 or 8"),
        (("llama-3.1-8b", "--for", "inference", "--context", "9e18"), "of keys and values for one sequence"),
        (
            ("model_type=gpt2", "n_embd=768", "n_layer=1e9", "n_head=12", "vocab_size=50k", "n_positions=8"),
            "up to 16384",
        ),
        (("llama-3.1-8b", "--engine", "megatorn"), "did you mean megatron"),
        (("llama-3.1-8b", "--precision", "fp7"), "use bf16"),
        (("llama-3.1-8b", "--export", "alpa"), "use megatron, torchtitan"),
        (("llama-3.1-8b", "--json", "no/such/folder.json"), "cannot be written"),
        (("llama-3.1-8b", "-o", "plan.json"), "write a run file"),
        (("llama-3.1-8b", "num_hidden_layers=0"), "num_hidden_layers = 0 cannot be"),
        (("llama-3.1-8b", "layers=3"), "is no size of a model"),
        (("llama-3.1-8b", "--for", "inference", "--precision", "fp16"), "use bf16, fp8 or int4"),
        (("llama-3.1-405b", "--for", "inference", "--cluster", "1x1xrtx-4090"), "of weights in bf16 and"),
        (("missing.toml",), "missing.toml"),
        (("hidden_size=64",), "is missing"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(words: tuple[str, ...], told: str, here: Typed) -> None:
    refuse(here("plan", *words), told)


def test_a_config_without_fields_is_refused_with_its_path(here: Typed, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "hidden_size": 64}')
    refuse(here("plan", "config.json"), "config.json", "intermediate_size is missing")
    (tmp_path / "config.json").write_text("[1, 2")
    refuse(here("plan", "config.json"), "config.json")


def test_a_model_that_fits_nowhere_says_what_is_missing_and_what_would_do(here: Typed) -> None:
    refuse(
        here("plan", "llama-3.1-405b", "--cluster", "1x8xh100"), "is missing", "optimizer",
        "the smallest cluster of such cards that would do is", "x8xh100",
    )  # fmt: skip


def test_a_plan_of_a_run_file_trains_as_it_is(here: Typed, tmp_path: Path) -> None:
    make_run(tmp_path)
    told = here("plan", "run.toml", "--cluster", "1x1xcpu", "-o", "plan.json")
    assert (told.code, told.err) == (0, "")
    made = load_plan(tmp_path / "plan.json")
    assert check(made.layout, made.run, made.cluster) == []
    assert {"step_s", "peak_allocated_bytes"} <= made.predictions.keys()
    assert here("train", "plan.json", "--run-dir", "run", "-q").code == 0
    assert len(losses(tmp_path / "run")) == 4


def test_what_a_run_files_layout_decides_stays(here: Typed, tmp_path: Path) -> None:
    make_run(tmp_path, layout={"tp": 2, "zero": 1})
    assert here("plan", "run.toml", "--cluster", "1x4xcpu", "-o", "plan.json").code == 0
    assert load_plan(tmp_path / "plan.json").layout.tp == 2


def test_a_reader_that_goes_away_is_no_trouble(tmp_path: Path) -> None:
    command = f"{sys.executable} -m triax plan llama-3.2-1b | head -1"
    done = subprocess.run(command, shell=True, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout.count(os.linesep)) == (0, "", 1)
