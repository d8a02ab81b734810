"""Does the command line prepare and show what a run reads, in words that a person and a pipe can read?"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.spec.run_files import Said, smallest, write
from triax.cli import run
from triax.cli.samples import rendered
from triax.data.batch import batches_of
from triax.data.corpus import corpus_of
from triax.data.files import find_files
from triax.data.packing import TokenSequence
from triax.data.prepare import prepare
from triax.data.tokenizer import ByteTokenizer

TEXT = "A document of some words. "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two sources, of many short documents and a long one."""
    rows = "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(300))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "web.txt").write_text(TEXT * 100)
    sources: list[Said] = [
        {"train": ["rows.jsonl"], "weight": 0.5, "name": "rows"}, {"train": ["web.txt"], "weight": 0.5, "name": "web"}
    ]  # fmt: skip
    data = {"seq_len": 32, "source": sources, "cache_dir": "cache", "attend_across_documents": False}
    write(tmp_path, {**smallest(), "data": data, "eval": {"sequences": 3}})
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command that succeeds says."""
    assert run(words) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence of a command that is bad input."""
    assert run(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_prepare_says_what_there_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "data", "prepare", str(folder / "run.toml")).splitlines()
    assert re.fullmatch(r"rows, 0\.5 of the samples: 2\.29k tokens, 300 documents in .*/cache/tokens/\w{16}", lines[0])
    assert re.fullmatch(r"web, 0\.5 of the samples: 2\.6k tokens, 1 document in .*/cache/tokens/\w{16}", lines[1])
    one = [str(folder / "run.toml"), "data.source=[{train=['web.txt'], weight=1}]"]
    assert said(capsys, "data", "prepare", *one).startswith("2.6k tokens, 1 document")


def test_prepare_writes_megatron_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "data", "prepare", str(folder / "run.toml"), "--megatron", str(folder / "meg" / "c"))
    assert out.splitlines()[2:] == [
        f"{folder}/meg/c-{name}.bin and {folder}/meg/c-{name}.idx" for name in ("rows", "web")
    ]
    assert (folder / "meg" / "c-web.idx").read_bytes()[:7] == b"MMIDIDX"
    again = [str(folder / "run.toml"), "data.source=[{train=['meg/c-web'], weight=1}]", "--processes", "1"]
    assert "2.6k tokens, 1 document" in said(capsys, "data", "prepare", *again)
    assert "exists already" in refused_after_words(capsys, folder)


def refused_after_words(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    assert run(["data", "prepare", str(folder / "run.toml"), "--megatron", str(folder / "meg" / "c")]) == 2
    return capsys.readouterr().err


def test_show_marks_what_the_network_sees(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Piped, as here: no colours, and brackets around what nothing predicts."""
    out = said(capsys, "data", "show", str(folder / "run.toml"), "--count", "100")
    assert "\x1b" not in out
    assert out.startswith("text, ⟨tokens that nothing predicts⟩, ■ where a document ends\n\nsample 0: sequence ")
    assert len(re.findall(r"^sample \d+: ", out, re.MULTILINE)) == 100
    assert out.count("from rows, ") == out.count("from web, ") == 50
    rows = next(part for part in out.split("\nsample ") if "from rows" in part)
    assert re.search(r"32 tokens in [3-6] documents kept apart, 2\d predictions count", rows)
    assert re.search(r"■\n\n─+\n⟨r⟩ow \d+■", rows)
    # The same sample again, alone.
    alone = said(capsys, "data", "show", str(folder / "run.toml"), "--sample", "7")
    assert alone.split("sample 7: ")[1] in out


def test_show_held_out_samples(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "data", "show", str(folder / "run.toml"), "--held-out", "--count", "3")
    assert out.count("held-out sample ") == 3
    message = refused(capsys, "data", "show", str(folder / "run.toml"), "--held-out", "--sample", "3")
    assert "--held-out --sample 3 --count 1: the run holds out 3 samples" in message


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["show", "--sample", "-1"], "are no samples: numbers start at 0"),
        (["show", "--count", "0"], "are no samples: numbers start at 0"),
        (["prepare", "--processes", "0"], "--processes 0 cannot be: use 1 or more"),
        (["prepare", "data.text_field=body"], "rows.jsonl, line 1: has no field 'body'; its fields are 'text'"),
        (["prepare", "data.seq_len=-1"], "data.seq_len = -1 cannot be"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    verb, *rest = words
    assert complaint in refused(capsys, "data", verb, str(folder / "run.toml"), *rest)


def sequence(text: str, folder: Path) -> TokenSequence:
    (folder / "a.txt").write_text(text)
    store = prepare(find_files([str(folder / "a.txt")]), ByteTokenizer(), folder / "cache")
    batches = batches_of(
        corpus_of(store), seq_len=len(text.encode()), attend_across_documents=True, eval_sequences=0, seed=0
    )
    return batches.sequences[0]


def test_a_corpus_cannot_move_the_cursor(tmp_path: Path) -> None:
    row = sequence("a\x1b[2Jb\x07\x9b\r\n[red]c", tmp_path)
    assert rendered(row, ByteTokenizer(), is_terminal=False).plain == "⟨a⟩\\x1b[2Jb\\x07\\x9b\\x0d\n[red]c"


def test_a_terminal_has_colours_and_no_brackets(tmp_path: Path) -> None:
    row = sequence("abc", tmp_path)
    text = rendered(row, ByteTokenizer(), is_terminal=True)
    assert text.plain == "abc"
    console = Console(force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(text)
    assert capture.get() == "\x1b[2;3ma\x1b[0mbc\n"


def test_masked_labels_are_shown(tmp_path: Path) -> None:
    """As of a conversation in which only the answers are learned."""
    row = sequence("question answer", tmp_path)
    labels = np.where(np.arange(15) < 8, -100, row.labels)
    row = TokenSequence(row.tokens, labels, row.positions, row.document_lengths)
    assert rendered(row, ByteTokenizer(), is_terminal=False).plain == "⟨question ⟩answer"
