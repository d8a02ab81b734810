"""Is a tokenizer trained from any text, the same each time, and read by the libraries people have?"""

import json
from pathlib import Path

import pytest
import tokenizers

from tests.data.test_tokenizer import TEXT
from triax.data.files import find_files
from triax.data.tokenizer import load_tokenizer
from triax.data.train_tokenizer import train_tokenizer
from triax.errors import BadInput

HARD = "naïve café\n\n\t  日本語 𝄞 <|endoftext|> x\x00\x7f  "


def corpus(folder: Path) -> list[str]:
    (folder / "a.txt").write_text(TEXT * 20)
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": TEXT + str(number)}) + "\n" for number in range(50)))
    return [str(folder / "a.txt"), str(folder / "b.jsonl")]


def test_a_trained_tokenizer_gives_back_any_text(tmp_path: Path) -> None:
    made = train_tokenizer(find_files(corpus(tmp_path)), tmp_path / "new" / "tok", vocab_size=300)
    assert (made.vocab_size, made.eos_id) == (300, 0)
    assert len(made.encode_batch([TEXT])[0]) < len(TEXT) / 2
    again = load_tokenizer(str(tmp_path / "new" / "tok"))
    assert again.fingerprint == made.fingerprint
    for text in (TEXT, HARD.replace("<|endoftext|>", "")):
        assert again.decode(again.encode_batch([text])[0].tolist()) == text
    # A text that spells out the end of a document means it, as everywhere in the library.
    assert again.eos_id in again.encode_batch([HARD])[0]
    assert sorted(path.name for path in (tmp_path / "new" / "tok").iterdir()) == [
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_ids_equal_the_library(tmp_path: Path) -> None:
    made = train_tokenizer(find_files(corpus(tmp_path)), tmp_path / "tok", vocab_size=400, eos_token="</s>")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tok" / "tokenizer.json"))
    for text in (TEXT, HARD, "", "</s>"):
        assert made.encode_batch([text])[0].tolist() == library.encode(text, add_special_tokens=False).ids


@pytest.mark.slow
def test_transformers_reads_the_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="reads the folder as a user would")
    made = train_tokenizer(find_files(corpus(tmp_path)), tmp_path / "tok", vocab_size=400, eos_token="</s>")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "tok"))
    for text in (TEXT, HARD, "", "</s>"):
        ids = made.encode_batch([text])[0].tolist()
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == made.eos_id


def test_equal_text_gives_equal_files(tmp_path: Path) -> None:
    words = corpus(tmp_path)
    for name in ("one", "two"):
        train_tokenizer(find_files(words), tmp_path / name, vocab_size=350)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_progress_reaches_the_whole(tmp_path: Path) -> None:
    files = find_files(corpus(tmp_path))
    seen: list[tuple[int, int]] = []
    train_tokenizer(files, tmp_path / "tok", vocab_size=300, progress=lambda done, total: seen.append((done, total)))
    total = sum(file.path.stat().st_size for file in files)
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


def test_a_text_without_pairs_gives_a_smaller_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a b c")
    assert train_tokenizer(find_files([str(tmp_path / "a.txt")]), tmp_path / "tok", vocab_size=1000).vocab_size < 300


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    files = find_files(corpus(tmp_path))
    with pytest.raises(BadInput, match=r"vocab_size=256 has no room for the 256 bytes and '</s>': use 257 or more"):
        train_tokenizer(files, tmp_path / "tok", vocab_size=256, eos_token="</s>")
    with pytest.raises(BadInput, match=r"exists already and is not empty: give another folder"):
        train_tokenizer(files, tmp_path, vocab_size=300)
    with pytest.raises(BadInput, match=r"a\.txt exists already and is not empty"):
        train_tokenizer(files, tmp_path / "a.txt", vocab_size=300)
    with pytest.raises(BadInput, match=r"a\.txt/tok cannot be written: File exists"):
        train_tokenizer(files, tmp_path / "a.txt" / "tok", vocab_size=300)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(BadInput, match=r"hold no text to train on"):
        train_tokenizer(find_files([str(tmp_path / "empty.txt")]), tmp_path / "tok", vocab_size=300)
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"text": 1}\n')
    with pytest.raises(BadInput, match=r"broken\.jsonl, line 2: field 'text' holds a number"):
        train_tokenizer(find_files([str(tmp_path / "broken.jsonl")]), tmp_path / "tok", vocab_size=300)
    assert not list(tmp_path.glob("*tok*"))
