"""Does the help of every verb come at once, plain and whole?"""

import subprocess
import sys

import pytest

from tests.cli.typed import ROOT, Typed, environment

HEAVY = ("torch", "numpy", "pydantic", "tokenizers", "tensorboard", "rich.markdown")


def test_the_command_line_loads_nothing_heavy_before_a_verb_is_known() -> None:
    code = f"import triax.cli, sys; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ((), ("train", "generate", "schedule", "checkpoint", "data", "config")),
        (("train",), ("RUN.toml", "[SECTION.KEY=VALUE]...", "--ranks", "--layout", "--run-dir", "--quiet")),
        (("generate",), ("--prompt", "--max-tokens", "--temperature", "--top-k", "--seed")),
        (("schedule",), ("--pp", "--microbatches", "--stages-per-rank")),
        (("checkpoint",), ("list", "verify", "prune")),
        (("checkpoint", "prune"), ("--keep", "--dry-run", "--json")),
        (("checkpoint", "verify"), ("exit code 1",)),
        (("data",), ("prepare", "show")),
        (("config",), ("show",)),
    ],
    ids=str,
)
def test_help(verb: tuple[str, ...], words: tuple[str, ...], here: Typed) -> None:
    told = here(*verb, "--help")
    assert (told.code, told.err) == (0, "")
    assert told.out.replace("\n", "").isascii()
    assert told.out.replace("\n", "").isprintable()
    assert [word for word in words if word not in told.out] == []


def test_no_words_at_all_show_the_help(here: Typed) -> None:
    assert here() == here("--help")
