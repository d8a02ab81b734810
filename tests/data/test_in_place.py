"""Are tokens that another tool has prepared read where they lie, and is what cannot be theirs refused?"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triax.data import in_place
from triax.data.in_place import store_in_place
from triax.data.pieces import SourceFile
from triax.data.store import INDEX_FILE, TOKENS_FILE, TokenStore, TornStore, open_store
from triax.data.tokenizer import ByteTokenizer
from triax.errors import BadInput
from triax.spec.data import TokenDtype

EOS = ByteTokenizer().eos_id
IDS = [97, 98, EOS, EOS, 99, EOS, 100]
"""Documents of 3, 1 and 2 tokens, and one that nothing ends."""


def documents(store: TokenStore) -> list[list[int]]:
    return [store.tokens[start:stop].tolist() for start, stop in pairwise(store.document_starts)]


def stored(path: Path, cache: Path, token_dtype: TokenDtype | None = None, **options: Any) -> TokenStore:
    return store_in_place(SourceFile(path, "tokens", token_dtype), ByteTokenizer(), cache, **options)


def npy(path: Path, ids: Any, dtype: str = "uint16") -> Path:
    np.save(path, np.array(ids, dtype=dtype))
    return path


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("block", [1, 2, 3, 100])
def test_a_flat_array_is_cut_at_its_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: TokenDtype, block: int
) -> None:
    monkeypatch.setattr(in_place, "_BLOCK", block)
    expected = [[97, 98, EOS], [EOS], [99, EOS], [100]]
    assert documents(stored(npy(tmp_path / "a.npy", IDS, dtype), tmp_path / "cache")) == expected
    (tmp_path / "raw.bin").write_bytes(np.array(IDS, dtype=dtype).tobytes())
    assert documents(stored(tmp_path / "raw.bin", tmp_path / "cache", dtype)) == expected


def test_tokens_are_not_copied(tmp_path: Path) -> None:
    path = npy(tmp_path / "a.npy", IDS)
    store = stored(path, tmp_path / "cache")
    assert not (store.folder / TOKENS_FILE).exists()
    assert isinstance(store.tokens, np.memmap)
    assert store.tokens.filename == path
    again = open_store(store.folder)
    assert documents(again) == documents(store)
    assert again.index == store.index


def test_progress_and_the_cache(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def found(path: Path) -> TokenStore:
        return stored(path, tmp_path / "cache", progress=lambda done, total: seen.append((done, total)))

    first = found(npy(tmp_path / "a.npy", IDS))
    assert found(tmp_path / "a.npy").index == first.index
    assert seen == [(14, 14)]


def test_a_file_that_was_moved_is_found_again(tmp_path: Path) -> None:
    first = stored(npy(tmp_path / "a.npy", IDS), tmp_path / "cache")
    (tmp_path / "a.npy").rename(tmp_path / "b.npy")
    with pytest.raises(TornStore, match=r"a\.npy cannot be read: No such file"):
        open_store(first.folder)
    moved = stored(tmp_path / "b.npy", tmp_path / "cache")
    assert (moved.folder, moved.index.fingerprint) == (first.folder, first.index.fingerprint)
    assert documents(open_store(moved.folder)) == documents(moved)


def test_what_changes_the_tokens_changes_the_store(tmp_path: Path) -> None:
    first = stored(npy(tmp_path / "a.npy", IDS), tmp_path / "cache")
    other = stored(npy(tmp_path / "a.npy", IDS[:-1]), tmp_path / "cache")
    assert first.index.fingerprint != other.index.fingerprint
    assert documents(other) == documents(stored(tmp_path / "a.npy", tmp_path / "cache"))[:3]


def test_a_file_that_was_cut_later_is_torn(tmp_path: Path) -> None:
    store = stored(npy(tmp_path / "a.npy", IDS), tmp_path / "cache")
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-2])
    with pytest.raises(TornStore, match=r"a\.npy has 140 bytes in place of 142"):
        open_store(store.folder)


@pytest.mark.parametrize(("ids", "complaint"), [([1, 257, 300], "has id 257 at token 1,"), ([5, -1], "has id -1 at")])
def test_ids_beyond_the_tokenizer_are_refused(tmp_path: Path, ids: list[int], complaint: str) -> None:
    path = npy(tmp_path / "a.npy", ids, "int32")
    with pytest.raises(BadInput, match=rf"a\.npy {complaint}.*tokenizer bytes end at 256: give the tokenizer it was"):
        stored(path, tmp_path / "cache")
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (np.zeros((2, 3), dtype="uint16"), r"holds uint16 in shape \(2, 3\): a flat array of uint8, uint16"),
        (np.zeros(3), r"holds float64 in shape \(3,\)"),
        (np.zeros(3, dtype=">u2"), r"holds >u2 in shape"),
        (np.uint16(3), r"holds uint16 in shape \(\)"),
        (np.array([None]), r"is no whole \.npy array: Array can't be memory-mapped: Python objects in dtype"),
        (np.zeros(0, dtype="uint16"), r"(holds no tokens|is no whole \.npy array)"),
    ],
)
def test_an_array_of_another_kind_is_refused(tmp_path: Path, content: Any, complaint: str) -> None:
    np.save(tmp_path / "a.npy", content)
    with pytest.raises(BadInput, match=rf"a\.npy {complaint}"):
        stored(tmp_path / "a.npy", tmp_path / "cache")


@pytest.mark.parametrize(
    "content", [b"", b"no array at all", b"PK\x03\x04", b"\x93NUMPY\x01\x00\x10\x00{'descr': 1}     \n"]
)
def test_what_is_no_array_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(BadInput, match=r"a\.npy is no whole \.npy array: "):
        stored(tmp_path / "a.npy", tmp_path / "cache")


def test_an_array_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = npy(tmp_path / "a.npy", IDS)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadInput, match=r"a\.npy is no whole \.npy array: "):
        stored(path, tmp_path / "cache")


def test_a_raw_array_must_be_told(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\1\0\2")
    with pytest.raises(BadInput, match=r"does not say what its tokens are: give data\.token_dtype, such as \"uint16\""):
        stored(tmp_path / "a.bin", tmp_path / "cache")
    with pytest.raises(BadInput, match=r"has 3 bytes, which is no whole number of uint16 tokens: it was cut, or data"):
        stored(tmp_path / "a.bin", tmp_path / "cache", "uint16")
    (tmp_path / "empty.bin").write_bytes(b"")
    with pytest.raises(BadInput, match=r"empty\.bin holds no tokens"):
        stored(tmp_path / "empty.bin", tmp_path / "cache", "uint16")
    with pytest.raises(BadInput, match=r"gone\.bin cannot be read: No such file"):
        stored(tmp_path / "gone.bin", tmp_path / "cache", "uint16")


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    path = npy(tmp_path / "a.npy", IDS)

    def touch(done: int, total: int) -> None:
        with path.open("ab") as stream:
            stream.write(b"x")

    with pytest.raises(BadInput, match=r"a\.npy was changed while it was read"):
        stored(path, tmp_path / "cache", progress=touch)
    assert not list((tmp_path / "cache" / "tokens").rglob(INDEX_FILE))
