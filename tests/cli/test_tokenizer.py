"""Does the command line make a tokenizer that a run can use?"""

from pathlib import Path

import pytest

from tests.spec.run_files import smallest, write
from triax.cli import run
from triax.data.tokenizer import load_tokenizer

TEXT = "Sing, O goddess, the anger of Achilles son of Peleus. " * 50


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(TEXT)
    (tmp_path / "text" / "b.py").write_text("def sing(goddess): pass\n" * 50)
    return tmp_path


def test_a_tokenizer_is_trained_and_used(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tokenizer", "train", str(folder / "text"), "-o", str(folder / "tok"), "--vocab-size", "280"]
    assert run([*words, "--eos", "<eos>"]) == 0
    assert capsys.readouterr().out == f"280 tokens, documents end with <eos> (id 0), in {folder}/tok\n"
    assert load_tokenizer(str(folder / "tok")).vocab_size == 280
    data = {"train": ["text"], "seq_len": 32, "tokenizer": "tok", "cache_dir": "cache"}
    path = write(folder, {**smallest(), "data": data, "model": {**smallest()["model"], "vocab_size": 280}})
    assert run(["data", "prepare", str(path)]) == 0
    assert run(words) == 2
    assert "exists already and is not empty: give another folder" in capsys.readouterr().err


def test_endings_and_small_texts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tokenizer", "train", str(folder / "text"), "-o", str(folder / "tok"), "--extension", ".py"]
    assert run(words) == 0
    assert " (32,000 were asked for, and the text has no more pairs), " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nowhere"], "nowhere is missing"),
        (["text", "--format", "word"], "triax tokenizer train: format = 'word' cannot be: use 'auto', 'text', "),
        (["text", "--vocab-size", "99"], "vocab_size=99 has no room for the 256 bytes"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], complaint: str
) -> None:
    monkeypatch.chdir(folder)
    assert run(["tokenizer", "train", *words, "-o", "tok"]) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert captured.out == ""
    assert not (folder / "tok").exists()
