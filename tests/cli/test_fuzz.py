"""Does any command line, however odd, end with a code and a sentence, and never with a traceback?"""

import contextlib
import io
import os
import string
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.cli.typed import Typed, make_run, refuse
from triax.cli import run

VERBS = (
    ("train",), ("generate",), ("schedule",), ("checkpoint",), ("checkpoint", "list"), ("checkpoint", "verify"),
    ("checkpoint", "prune"),
    ("data", "prepare"), ("data", "show"), ("config", "show"), ("import",), ("export",), ("tokenizer", "train"), (),
)  # fmt: skip
TARGETS = (
    "run.toml", "plan.json", "nope.toml", ".", "/dev/null", "/proc/self/mem", "corpus.jsonl", "garbage",
    "garbage/plan.json", "-", "--", "",
)  # fmt: skip
OPTIONS = (
    "--ranks", "--layout", "--run-dir", "--quiet", "-q", "--help", "--prompt", "--max-tokens", "--temperature",
    "--top-k", "--seed", "--pp", "--microbatches", "--stages-per-rank", "--sample", "--count", "-o", "--vocab-size",
    "--dtype", "--processes",
)  # fmt: skip
VALUES = ("0", "1", "-1", "2", "999999999999999999999", "1e999", "nan", "fp16", "pp=2", "tp=2 zero=9", "[", "1F1B", "x")
KEYS = (
    "model.vocab_size",
    "train.steps",
    "train.seed",
    "layout.zero",
    "optimizer.eps",
    "model",
    "cluster.servers",
    "a.b",
)

# What the kernel can hand to a process: any text but NUL, and bytes that are no text. Nothing that leads out of the
# folder, since a command may write.
anything = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"], exclude_characters="\0/~"),
        st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF),
    ),
    max_size=20,
).filter(lambda text: ".." not in text)
value = st.sampled_from(VALUES) | anything
override = st.builds("{}={}".format, st.sampled_from(KEYS) | st.text(string.ascii_lowercase + ".", max_size=9), value)
word = st.sampled_from(TARGETS) | st.sampled_from(OPTIONS) | override | value
line = st.builds(
    lambda verb, target, words: [*verb, target, *words],
    st.sampled_from(VERBS), st.sampled_from(TARGETS) | anything, st.lists(word, max_size=5),
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which nothing can be trained: the run's corpus is missing, and the rest is garbage."""
    folder = tmp_path_factory.mktemp("fuzz")
    make_run(folder, data={"train": ["missing.txt"]})
    (folder / "plan.json").write_text("{}")
    (folder / "garbage" / "checkpoints" / "step-00000001").mkdir(parents=True)
    for name in ("plan.json", "config.json", "tokenizer.json", "checkpoints/step-00000001/manifest.json"):
        (folder / "garbage" / name).write_text('{"format_version": [], "a": 1e400}')
    return folder


@given(words=line)
@example(words=["train", "run.toml", "--layout", "zero=[" * 500])
@example(words=["train", "run.toml", "model.vocab_size=" + "9" * 5000])
@example(words=["train", "run.toml", "layout." + ".".join("x" * 2000) + "=1"])
@example(words=["config", "show", "run.toml", "optimizer.eps=1e-400"])
@example(words=["config", "show", "run.toml", "data.train=['\udcff']"])
@example(words=["schedule", "GPipe", "--pp", "256", "--microbatches", "1"])
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_command_line_ends_in_a_sentence(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(words)
    said = err.getvalue()
    assert code in (0, 1, 2)
    assert (said == "") == (code == 0)
    assert all(line.startswith("triax: ") and line.isprintable() for line in said.splitlines())


@given(content=st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass")))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_plan_ends_in_a_sentence(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_bytes(content)
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        assert run(["train", "plan.json"]) == 2
    assert all(line.startswith("triax: ") and line.isprintable() for line in err.getvalue().splitlines())


@pytest.mark.parametrize(
    "verb", [("train",), ("generate", "--prompt", "x"), ("checkpoint", "list"), ("config", "show")]
)
@pytest.mark.parametrize("kind", ["pipe", "device", "loop", "unreadable folder"])
def test_targets_that_are_no_files(verb: tuple[str, ...], kind: str, tmp_path: Path, here: Typed) -> None:
    target = tmp_path / "target.toml"
    match kind:
        case "pipe":
            os.mkfifo(target)
        case "device":
            target.symlink_to("/dev/zero")
        case "loop":
            target.symlink_to(target)
        case _:
            target = Path("/proc/1/fd/nothing.toml")
    refuse(here(*verb, target))
