"""Do import, export and generate do what a person types, and refuse in a sentence what cannot be?"""

import json
from pathlib import Path

import pytest

from tests.cli.typed import Typed, refuse, tiny
from tests.harness.hf_models import make, opened, save
from tests.harness.runs import write_corpus
from tests.spec.run_files import write
from triax.checkpoint import huggingface
from triax.data.byte_level import byte_tokenizer_json


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A Hugging Face folder with a tokenizer of bytes."""
    folder = save(make("qwen2", vocab_size=257), tmp_path / "hf")
    (folder / "tokenizer.json").write_text(byte_tokenizer_json())
    return folder


def test_from_a_folder_through_training_to_a_folder(here: Typed, hf: Path) -> None:
    told = here("import", "hf", "start")
    assert (told.code, told.err) == (0, "")
    assert told.out.splitlines()[1] == "carried along: config.json, generation_config.json, tokenizer.json"

    write_corpus(hf.parent)
    run_file = write(hf.parent, {**tiny(), "model": {"init": "start"}})
    assert here("train", run_file, "train.steps=2", "--ranks", 1, "--quiet").code == 0
    shown = here("config", "show", run_file)
    assert 'init = "' in shown.out
    assert f'tokenizer = "{hf.parent / "start" / "huggingface"}"' in shown.out

    told = here("export", "runs/run", "out", "--dtype", "bf16")
    assert (told.code, told.err) == (0, ""), told.err
    assert "as bf16" in told.out
    assert "equal within 0.0e+00" in told.out
    assert "rounding to bf16 changed them by at most" in told.out
    assert opened(hf.parent / "out").config.model_type == "qwen2"


def test_the_resolved_file_of_a_run_starts_the_same_run(here: Typed, hf: Path) -> None:
    assert here("import", "hf", "start").code == 0
    write_corpus(hf.parent)
    run_file = write(hf.parent, {**tiny(), "model": {"init": "start"}})
    assert here("train", run_file, "train.steps=1", "--ranks", 1, "--quiet").code == 0
    shown = [here("config", "show", *words).out for words in ((run_file, "train.steps=1"), ("runs/run/resolved.toml",))]
    before, after = (text.partition("[layout]")[0] for text in shown)
    assert "init = " in before
    assert after == before


@pytest.mark.parametrize("source", ["hf", "start", "out"])
def test_a_folder_and_its_checkpoints_write_the_same(here: Typed, hf: Path, source: str) -> None:
    assert here("import", "hf", "start").code == 0
    assert here("export", "start", "out").code == 0
    words = ("--prompt", "abc", "--max-tokens", 5, "--temperature", 0)
    expected, told = here("generate", "hf", *words), here("generate", source, *words)
    assert (told.code, told.err) == (0, "")
    assert told.out == expected.out
    assert told.out.startswith("abc")


def test_what_cannot_be_is_one_sentence(here: Typed, hf: Path) -> None:
    (hf.parent / "empty").mkdir()
    refuse(here("import", "nowhere", "start"), "nowhere is no folder")
    refuse(here("import", "empty", "start"), "empty holds no config.json")
    refuse(here("import", "a" * 5000, "start"), "is no folder")
    refuse(here("import", "hf", "a" * 5000), "cannot be made: file name too long")
    refuse(here("import", "hf", "hf"), "hf is there already, and nothing is overwritten")
    refuse(here("import", "hf", "hf/config.json/start"), "start cannot be made: ")
    refuse(here("import", "hf", "/proc/start"), "/proc/start cannot be made: no such file or directory")
    refuse(here("export", "empty", "out"), "holds no finished checkpoint")
    refuse(here("export", "hf", "out"), "holds no finished checkpoint")
    refuse(here("export", "a" * 5000, "out"), "is no folder")
    refuse(here("export", "start", "out", "--dtype", "int4"), "dtype")
    (hf / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    refuse(here("import", "hf", "start"), "model_type = 'gpt2' cannot be")
    refuse(here("generate", "hf", "--prompt", "a"), "model_type = 'gpt2' cannot be")
    assert sorted(path.name for path in hf.parent.iterdir()) == ["empty", "hf"]


def test_a_wrong_export_is_code_1_and_removed(here: Typed, hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert here("import", "hf", "start").code == 0
    config_of = huggingface.config_of
    monkeypatch.setattr(huggingface, "config_of", lambda *a, **k: {**config_of(*a, **k), "rms_norm_eps": 0.5})
    told = here("export", "start", "out")
    assert (told.code, told.out) == (1, "")
    assert "is not the network of start" in told.sentence
    assert not (hf.parent / "out").exists()


def test_without_a_tokenizer_nothing_can_be_written(here: Typed, hf: Path) -> None:
    (hf / "tokenizer.json").unlink()
    assert here("import", "hf", "start").code == 0
    refuse(here("generate", "start", "--prompt", "a"), "start has no tokenizer")
    assert "at random, since there is no tokenizer" in here("export", "start", "out").out
