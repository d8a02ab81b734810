"""Do texts become the ids their tokenizer says, and is a tokenizer that cannot serve refused?"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from triax.data.tokenizer import ByteTokenizer, JsonTokenizer, check_fits, load_tokenizer
from triax.errors import BadInput

TEXT = "Sing, O goddess, the anger of Achilles son of Peleus, that brought countless ills upon the Achaeans.\n"


def trained(folder: Path, special_tokens: Sequence[str] = ("<|endoftext|>",)) -> Path:
    """A byte-level BPE tokenizer as GPT-2's, saved as tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special_tokens), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_bytes_go_there_and_back(texts: list[str]) -> None:
    tokenizer = ByteTokenizer()
    encoded = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in encoded] == [list(text.encode()) for text in texts]
    assert [tokenizer.decode(ids.tolist()) for ids in encoded] == texts


def test_bytes_decode_what_is_no_text() -> None:
    assert ByteTokenizer().decode([0xE2, 0x82, 256, 97, 511]) == "�a"


def test_ids_equal_the_library(tmp_path: Path) -> None:
    path = trained(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(path))
    tokenizer = load_tokenizer(str(path))
    texts = [TEXT, "", "  naïve café\n\n\t", TEXT * 50, "<|endoftext|>"]
    encoded = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in encoded] == [library.encode(text, add_special_tokens=False).ids for text in texts]
    assert [tokenizer.decode(ids.tolist()) for ids in encoded] == [*texts[:4], ""]
    assert tokenizer.vocab_size == library.get_vocab_size()
    assert tokenizer.eos_id == library.token_to_id("<|endoftext|>")


def test_a_folder_stands_for_its_tokenizer(tmp_path: Path) -> None:
    path = trained(tmp_path)
    assert load_tokenizer(str(tmp_path)).fingerprint == load_tokenizer(str(path)).fingerprint


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    path = trained(tmp_path)
    plain = load_tokenizer(str(path)).encode_batch([TEXT, "a"])
    library = tokenizers.Tokenizer.from_file(str(path))
    library.enable_truncation(max_length=4)
    library.enable_padding(length=512)
    library.save(str(path))
    assert [ids.tolist() for ids in load_tokenizer(str(path)).encode_batch([TEXT, "a"])] == [x.tolist() for x in plain]


def test_vocab_size_counts_gaps(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    vocabulary = {"a": 0, "b": 7, "</s>": 9}
    Tokenizer(models.WordLevel(vocabulary, unk_token="a")).save(str(path))
    assert load_tokenizer(str(path)).vocab_size == 10


@pytest.mark.parametrize(
    ("beside", "content"),
    [
        ("tokenizer_config.json", {"eos_token": "<end>"}),
        ("tokenizer_config.json", {"eos_token": {"content": "<end>", "special": True}}),
        ("special_tokens_map.json", {"eos_token": "<end>"}),
    ],
)
def test_files_beside_say_what_ends_a_document(tmp_path: Path, beside: str, content: dict[str, object]) -> None:
    path = trained(tmp_path, ["</s>", "<end>"])
    usual = load_tokenizer(str(path))
    (tmp_path / beside).write_text(json.dumps(content))
    said = load_tokenizer(str(path))
    assert (usual.eos_id, said.eos_id) == (0, 1)
    assert usual.fingerprint != said.fingerprint


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    path = trained(tmp_path, ["<stop>"])
    with pytest.raises(BadInput, match=r'no token that ends a document .*</s>.*\{"eos_token": "THE_TOKEN"\} into '):
        load_tokenizer(str(path))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    assert load_tokenizer(str(path)).eos_id == 0


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            '{"eos_token": "<none>"}',
            r"tokenizer_config\.json says that '<none>' ends a document, and tokenizer",
        ),
        ("{", r"tokenizer_config\.json is not JSON"),
        ("[" * 100_000, r"tokenizer_config\.json is not JSON"),
    ],
)
def test_a_broken_config_is_refused(tmp_path: Path, config: str, complaint: str) -> None:
    path = trained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(BadInput, match=complaint):
        load_tokenizer(str(path))


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"version": "1.0", "model": {"type": "no"}}'])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"tokenizer\.json is not a Hugging Face tokenizer\.json: "):
        load_tokenizer(str(path))


def test_an_empty_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE()).save(str(path))
    with pytest.raises(BadInput, match="empty vocabulary"):
        load_tokenizer(str(path))


@pytest.mark.parametrize("said", ["gpt2", "none/tokenizer.json", "."])
def test_a_missing_tokenizer_is_named(tmp_path: Path, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r'is missing: data\.tokenizer is "bytes", a tokenizer\.json, or a folder'):
        load_tokenizer(said)


def test_a_tokenizer_must_fit_the_vocabulary(tmp_path: Path) -> None:
    check_fits(ByteTokenizer(), 257)
    check_fits(ByteTokenizer(), 320)
    tokenizer = JsonTokenizer(trained(tmp_path))
    for too_small, tokens in ((256, ByteTokenizer()), (299, tokenizer)):
        with pytest.raises(BadInput, match=rf"ids up to {too_small}, too large for model\.vocab_size={too_small}"):
            check_fits(tokens, too_small)
