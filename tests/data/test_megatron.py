"""Are Megatron's files read and written byte by byte as their format says, and are hostile ones refused?

The writer and the reader here were made from the description of the format alone (header, lengths, pointers,
documents), independently of triax's.
"""

import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.corpora import memory_store, text_store
from triax.data import megatron
from triax.data.files import find_files
from triax.data.in_place import store_in_place
from triax.data.megatron import read_index, write_megatron
from triax.data.pieces import SourceFile
from triax.data.store import TokenStore
from triax.data.tokenizer import ByteTokenizer
from triax.errors import BadInput

CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}


def written_by_hand(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16") -> Path:
    """Documents of sequences of tokens, as Megatron's builder writes them; returns the ``.idx``."""
    sequences = [sequence for document in documents for sequence in document]
    width = np.dtype(dtype).itemsize
    idx = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(documents) + 1)
    for sequence in sequences:
        idx += struct.pack("<i", len(sequence))
    at = 0
    for sequence in sequences:
        idx += struct.pack("<q", at)
        at += width * len(sequence)
    count = 0
    for document in documents:
        idx += struct.pack("<q", count)
        count += len(document)
    idx += struct.pack("<q", count)
    path = prefix.with_name(prefix.name + ".idx")
    path.write_bytes(idx)
    tokens = [token for sequence in sequences for token in sequence]
    prefix.with_name(prefix.name + ".bin").write_bytes(np.array(tokens, dtype=dtype).tobytes())
    return path


def read_by_hand(prefix: Path) -> list[list[list[int]]]:
    """The documents of sequences that a pair of files holds."""
    idx = prefix.with_name(prefix.name + ".idx").read_bytes()
    tokens = prefix.with_name(prefix.name + ".bin").read_bytes()
    assert idx[:9] == b"MMIDIDX\x00\x00"
    version, code, num_sequences, num_entries = struct.unpack_from("<QBQQ", idx, 9)
    assert version == 1
    dtype = np.dtype({number: name for name, number in CODES.items()}[code])
    lengths = struct.unpack_from(f"<{num_sequences}i", idx, 34)
    pointers = struct.unpack_from(f"<{num_sequences}q", idx, 34 + 4 * num_sequences)
    entries = struct.unpack_from(f"<{num_entries}q", idx, 34 + 12 * num_sequences)
    assert len(idx) == 34 + 12 * num_sequences + 8 * num_entries
    sequences = [
        np.frombuffer(tokens, dtype, length, pointer).tolist()
        for length, pointer in zip(lengths, pointers, strict=True)
    ]
    return [sequences[first:last] for first, last in pairwise(entries)]


def documents_of(store: TokenStore) -> list[list[int]]:
    return [store.tokens[start:stop].tolist() for start, stop in pairwise(store.document_starts)]


tokens = st.lists(st.integers(0, 255), max_size=6)
some_documents = st.lists(st.lists(tokens, max_size=4), min_size=1, max_size=12).filter(
    lambda documents: any(sequence for document in documents for sequence in document)
)


@given(some_documents, st.sampled_from(sorted(CODES)), st.integers(1, 5))
def test_files_of_megatron_are_read(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], dtype: str, block: int
) -> None:
    """Documents of several sequences and of none, in every type, however the index is read in blocks."""
    folder = tmp_path_factory.mktemp("megatron")
    path = written_by_hand(folder / "corpus", documents, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron, "_BLOCK", block)
        store = store_in_place(SourceFile(path, "megatron"), ByteTokenizer(), folder / "cache")
    whole = [[token for sequence in document for token in sequence] for document in documents]
    assert documents_of(store) == [document for document in whole if document]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 7), st.sampled_from([65_499, 65_500]))
def test_what_triax_writes_is_what_megatron_writes(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], block: int, vocab_size: int
) -> None:
    """Byte by byte: one sequence for each document, uint16 below 65,500 ids and int32 from there on."""
    folder = tmp_path_factory.mktemp("megatron")
    store = memory_store(lengths)
    store = TokenStore(
        store.folder, store.index.model_copy(update={"vocab_size": vocab_size}), store.tokens, store.document_starts
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron, "_BLOCK", block)
        write_megatron(store, folder / "ours")
    dtype = "uint16" if vocab_size < 65_500 else "int32"
    written_by_hand(folder / "theirs", [[document] for document in documents_of(store)], dtype)
    for ending in (".bin", ".idx"):
        assert (folder / f"ours{ending}").read_bytes() == (folder / f"theirs{ending}").read_bytes()
    assert read_by_hand(folder / "ours") == [[document] for document in documents_of(store)]


def test_there_and_back(tmp_path: Path) -> None:
    store = text_store(tmp_path, ["ab", "cdef", "g"])
    write_megatron(store, tmp_path / "new" / "corpus.v1")
    for word in ("corpus.v1", "corpus.v1.bin", "corpus.v1.idx", "corpus.*", "."):
        (file,) = find_files([str(tmp_path / "new" / word)])
        again = store_in_place(file, ByteTokenizer(), tmp_path / "cache")
        assert documents_of(again) == documents_of(store)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["corpus.v1.bin", "corpus.v1.idx"]


def test_progress_and_refusals_of_writing(tmp_path: Path) -> None:
    store = text_store(tmp_path, ["ab", "cde"])
    seen: list[tuple[int, int]] = []
    write_megatron(store, tmp_path / "c", lambda done, total: seen.append((done, total)))
    assert seen == [(7, 7)]
    with pytest.raises(BadInput, match=r"c\.bin exists already: give another prefix, or remove it"):
        write_megatron(store, tmp_path / "c")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"file/c\.bin and \.idx cannot be written: "):
        write_megatron(store, tmp_path / "file" / "c")
    starts = np.array([0, 2**31])
    long = TokenStore(store.folder, store.index, store.tokens, starts)
    with pytest.raises(BadInput, match=r"A document has 2,147,483,648 tokens, and Megatron's index counts less"):
        write_megatron(long, tmp_path / "long")
    assert not list(tmp_path.glob("*long*"))


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(megatron, "_write_index", full)
    store = text_store(tmp_path, ["ab"])
    with pytest.raises(BadInput, match=r"c\.bin and \.idx cannot be written: No space left on device"):
        write_megatron(store, tmp_path / "out" / "c")
    assert list((tmp_path / "out").iterdir()) == []


DOCUMENTS = [[[1, 2, 3]], [[4, 5], [6]], [[7]]]


def patched(path: Path, offset: int, layout: str, *values: Any) -> None:
    content = bytearray(path.read_bytes())
    struct.pack_into(layout, content, offset, *values)
    path.write_bytes(content)


# Four sequences: the header has 34 bytes, then come 4 x 4 bytes of lengths, 4 x 8 of pointers and 4 x 8 of documents.
HOSTILE: list[tuple[int, str, tuple[Any, ...], str]] = [
    (0, "<9s", (b"MMIDIDY\0\0",), r"is no index of Megatron's: it does not begin with MMIDIDX"),
    (9, "<Q", (2,), r"is an index of version 2, and 1 is the only one"),
    (17, "<B", (7,), r"says its corpus has float32 tokens; uint8, int32, int64, uint16 can be read"),
    (17, "<B", (99,), r"tokens of the unknown type 99"),
    (17, "<B", (4,), r"sequence 1 begins at byte 6, and those before it end at byte 12: offsets that overlap"),
    (18, "<Q", (2**63,), r"9,223,372,036,854,775,808 sequences .* it was cut or is damaged"),
    (18, "<Q", (5,), r"it was cut or is damaged"),
    (26, "<Q", (2**64 - 1,), r"entries of documents take .* it was cut or is damaged"),
    (34, "<i", (-3,), r"sequence 0 has -3 tokens: the index is damaged"),
    (34, "<i", (2**31 - 1,), r"sequence 1 begins at byte 6, and those before it end at byte 4,294,967,294"),
    (46, "<i", (2**31 - 1,), r"corpus\.bin has 14 bytes, and its \.idx lists sequences of 4,294,967,306"),
    (50, "<q", (-2,), r"sequence 0 begins at byte -2"),
    (
        58,
        "<q",
        (4,),
        r"sequence 1 begins at byte 4, and those before it end at byte 6: offsets that overlap or leave gaps",
    ),
    (58, "<q", (8,), r"sequence 1 begins at byte 8, and those before it end at byte 6"),
    (74, "<q", (2**62,), r"sequence 3 begins at byte"),
    (82, "<q", (1,), r"its documents do not run from sequence 0 to 4 in order: it is damaged"),
    (90, "<q", (4,), r"its documents do not run"),
    (98, "<q", (-1,), r"its documents do not run"),
    (106, "<q", (3,), r"its documents do not run"),
]


@pytest.mark.parametrize(("offset", "layout", "values", "complaint"), HOSTILE)
def test_a_hostile_index_is_refused(
    tmp_path: Path, offset: int, layout: str, values: tuple[Any, ...], complaint: str
) -> None:
    path = written_by_hand(tmp_path / "corpus", DOCUMENTS)
    assert read_index(path).num_tokens == 7
    patched(path, offset, layout, *values)
    with pytest.raises(BadInput, match=complaint) as caught:
        store_in_place(SourceFile(path, "megatron"), ByteTokenizer(), tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("cache/tokens/*"))


@pytest.mark.parametrize("length", [0, 5, 33, 34, 60, 113])
def test_an_index_that_was_cut_is_refused(tmp_path: Path, length: int) -> None:
    path = written_by_hand(tmp_path / "corpus", DOCUMENTS)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(BadInput, match=r"corpus\.idx (is no index of Megatron's|.* it was cut or is damaged)"):
        read_index(path)


@pytest.mark.parametrize("change", [-1, 1])
def test_tokens_of_another_length_are_refused(tmp_path: Path, change: int) -> None:
    path = written_by_hand(tmp_path / "corpus", DOCUMENTS)
    content = path.with_suffix(".bin").read_bytes()
    path.with_suffix(".bin").write_bytes(content[:change] if change < 0 else content + b"\0")
    with pytest.raises(BadInput, match=r"corpus\.bin has 1[35] bytes, and its \.idx lists sequences of 14"):
        read_index(path)


def test_an_index_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"lists no sequence or no document"):
        read_index(written_by_hand(tmp_path / "none", []))
    with pytest.raises(BadInput, match=r"lists no tokens"):
        read_index(written_by_hand(tmp_path / "empty", [[[]]]))
    path = written_by_hand(tmp_path / "corpus", DOCUMENTS)
    path.write_bytes(path.read_bytes() + b"\0" * 4)
    with pytest.raises(BadInput, match=r"is the index of a multimodal corpus"):
        read_index(path)
    path.with_suffix(".bin").unlink()
    with pytest.raises(BadInput, match=r"corpus\.bin cannot be read: No such file.*; Megatron's tokens are a pair"):
        read_index(path)
