"""Are windows cut, labelled and numbered right at the ends of documents?"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.corpora import memory_store, text_store
from triax.data.packing import IGNORE, PackedSequences, TokenSequence
from triax.errors import BadInput


def fields(sequence: TokenSequence) -> list[list[int]]:
    """Tokens, labels, positions and document lengths as lists."""
    arrays = (sequence.tokens, sequence.labels, sequence.positions, sequence.document_lengths)
    return [array.tolist() for array in arrays]


def test_one_document_per_sequence_when_attention_crosses() -> None:
    # Documents of 3, 2 and 5 tokens: 0 1 2 | 3 4 | 5 6 7 8 9
    packed = PackedSequences(memory_store([3, 2, 5]), seq_len=4, attend_across_documents=True)
    assert len(packed) == 2
    assert fields(packed[0]) == [[0, 1, 2, 3], [1, 2, 3, 4], [0, 1, 2, 3], [4]]
    assert fields(packed[1]) == [[4, 5, 6, 7], [5, 6, 7, 8], [0, 1, 2, 3], [4]]


def test_documents_are_kept_apart_when_asked() -> None:
    packed = PackedSequences(memory_store([3, 2, 5]), seq_len=4, attend_across_documents=False)
    # 2 ends a document, and so does 4, the first token of its window.
    assert fields(packed[0]) == [[0, 1, 2, 3], [1, 2, IGNORE, 4], [0, 1, 2, 0], [3, 1]]
    assert fields(packed[1]) == [[4, 5, 6, 7], [IGNORE, 6, 7, 8], [0, 0, 1, 2], [1, 3]]


def test_a_document_that_ends_with_its_window_predicts_nothing() -> None:
    packed = PackedSequences(memory_store([4, 5]), seq_len=4, attend_across_documents=False)
    assert fields(packed[0]) == [[0, 1, 2, 3], [1, 2, 3, IGNORE], [0, 1, 2, 3], [4]]
    assert fields(packed[1]) == [[4, 5, 6, 7], [5, 6, 7, 8], [0, 1, 2, 3], [4]]


def test_a_document_longer_than_its_window_goes_on_at_position_zero() -> None:
    packed = PackedSequences(memory_store([9]), seq_len=4, attend_across_documents=False)
    assert fields(packed[1]) == [[4, 5, 6, 7], [5, 6, 7, 8], [0, 1, 2, 3], [4]]


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) > 1),
    st.integers(1, 16),
    st.booleans(),
)
def test_windows_tile_the_corpus(lengths: list[int], seq_len: int, attend: bool) -> None:
    """Against the definition, one token at a time."""
    total = sum(lengths)
    if total <= seq_len:
        return
    # Of each token: its document.
    owner = np.repeat(np.arange(len(lengths)), lengths)
    packed = PackedSequences(memory_store(lengths), seq_len, attend)
    assert len(packed) == (total - 1) // seq_len
    for number in range(len(packed)):
        sequence = packed[number]
        assert sequence.document_lengths.sum() == seq_len
        assert sequence.document_lengths.min() > 0
        window = range(number * seq_len, (number + 1) * seq_len)
        assert sequence.tokens.tolist() == list(window)
        for at, token in enumerate(window):
            is_last = not attend and owner[token] != owner[token + 1]
            assert sequence.labels[at] == (IGNORE if is_last else token + 1)
            seen = [earlier for earlier in window[: at + 1] if attend or owner[earlier] == owner[token]]
            assert sequence.positions[at] == len(seen) - 1
        starts = np.flatnonzero(sequence.positions == 0)
        assert np.diff(starts, append=seq_len).tolist() == sequence.document_lengths.tolist()


@pytest.mark.parametrize(("seq_len", "legal"), [(10, 9), (11, 9), (4096, 9)])
def test_a_corpus_shorter_than_a_sequence_is_refused(seq_len: int, legal: int) -> None:
    with pytest.raises(BadInput, match=rf"has 10 tokens, .* data\.seq_len={seq_len:,} .* to {legal} or less"):
        PackedSequences(memory_store([3, 7]), seq_len, attend_across_documents=True)
    assert len(PackedSequences(memory_store([3, 7]), legal, attend_across_documents=True)) == 1


def test_a_sequence_out_of_range_is_refused() -> None:
    packed = PackedSequences(memory_store([9]), seq_len=4, attend_across_documents=True)
    for number in (-1, 2):
        with pytest.raises(IndexError):
            packed[number]


@pytest.mark.parametrize("texts", [["ab", "cde", "f"], ["", "ab", ""]])
def test_text_comes_back_from_its_sequences(tmp_path: Path, texts: Sequence[str]) -> None:
    store = text_store(tmp_path, texts)
    packed = PackedSequences(store, seq_len=1, attend_across_documents=True)
    tokens = [int(packed[number].tokens[0]) for number in range(len(packed))]
    expected = [byte for text in texts if text for byte in (*text.encode(), 256)]
    assert tokens == expected[:-1]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the memory of a process this way")
def test_reading_maps_and_does_not_load(tmp_path: Path) -> None:
    """Memory of this process alone (RssAnon) hardly grows while it reads a store of 64 MiB."""
    store = text_store(tmp_path, ["x" * (1 << 20)] * 32)
    packed = PackedSequences(store, seq_len=1024, attend_across_documents=False)
    before = anonymous_bytes()
    for number in range(0, len(packed), 7):
        packed[number]
    assert anonymous_bytes() - before < 8 << 20


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])
