"""Does every layout read the same samples in a step, and are they what the store holds?"""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.corpora import memory_store
from triax.data.batch import Batch, Batches, batches_of, filled
from triax.data.corpus import corpus_of
from triax.data.packing import IGNORE
from triax.data.store import DOCUMENTS_FILE, INDEX_FILE, TOKENS_FILE, StoreIndex, open_store
from triax.errors import BadInput

SEQ_LEN = 4


def small(num_sequences: int = 40, eval_sequences: int = 5, *, attend: bool = True, seed: int = 0) -> Batches:
    """Batches over documents of 7 tokens."""
    store = memory_store([7] * ((num_sequences * SEQ_LEN + 7) // 7))
    return batches_of(
        corpus_of(store), seq_len=SEQ_LEN, attend_across_documents=attend, eval_sequences=eval_sequences, seed=seed
    )


cuts = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))


@given(cuts, st.integers(0, 10**9), st.booleans())
def test_a_step_has_the_same_samples_however_it_is_cut(cut: tuple[int, int, int], first: int, attend: bool) -> None:
    data_ranks, microbatches, per_microbatch = cut
    batches = small(attend=attend)
    step = batches.microbatch(first, 0, 0, 1, data_ranks * microbatches * per_microbatch, 1)
    parts = [
        batches.microbatch(first, microbatch, rank, data_ranks, per_microbatch, microbatches)
        for microbatch in range(microbatches)
        for rank in range(data_ranks)
    ]
    for name in ("tokens", "labels", "positions", "sequences"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(step, name))
    assert step.sequences.tolist() == batches.step_samples(first, len(step.sequences)).tolist()
    assert batches.step_hash(first, len(step.sequences)) == small().step_hash(first, len(step.sequences))


def shapes(batch: Batch) -> list[tuple[tuple[int, ...], np.dtype[np.generic]]]:
    return [(array.shape, array.dtype) for array in (batch.tokens, batch.labels, batch.positions, batch.sequences)]


def test_shapes_and_types() -> None:
    int64 = np.dtype(np.int64)
    for batch in (small().microbatch(0, 0, 0, 1, 3, 1), small().eval_batch(0, 3)):
        assert shapes(batch) == [((3, SEQ_LEN), int64)] * 3 + [((3,), int64)]
        assert batch.cu_seqlens is None
    apart = small(attend=False).microbatch(0, 0, 0, 1, 3, 1)
    assert apart.cu_seqlens is not None
    assert apart.cu_seqlens.dtype == np.int32


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_cu_seqlens_cuts_the_flattened_batch_at_documents(first: int, count: int) -> None:
    batch = small(attend=False).microbatch(first, 0, 0, 1, count, 1)
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [*np.flatnonzero(batch.positions.ravel() == 0).tolist(), count * SEQ_LEN]


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(0, 9), st.booleans())
def test_what_fills_a_sequence_up_is_a_document_that_counts_for_nothing(
    first: int, count: int, lacking: int, attend: bool
) -> None:
    batch = small(attend=attend).microbatch(first, 0, 0, 1, count, 1)
    wider = filled(batch, SEQ_LEN + lacking)
    for name in ("tokens", "labels", "positions"):
        assert np.array_equal(getattr(wider, name)[:, :SEQ_LEN], getattr(batch, name))
    assert (wider.labels[:, SEQ_LEN:] == IGNORE).all()
    assert wider.tokens.shape == wider.positions.shape == (count, SEQ_LEN + lacking)
    if lacking:
        assert wider.cu_seqlens is not None
        starts = np.flatnonzero(wider.positions.ravel() == 0)
        assert wider.cu_seqlens.tolist() == [*starts.tolist(), count * (SEQ_LEN + lacking)]
        assert [row[SEQ_LEN] for row in wider.positions] == [0] * count
    else:
        assert wider is batch


def test_an_epoch_reads_every_training_sequence_once() -> None:
    batches = small(40, 5)
    read = [int(row) for first in range(0, 35, 7) for row in batches.microbatch(first, 0, 0, 1, 7, 1).sequences]
    held_out = batches.eval_batch(0, 5).sequences.tolist()
    assert sorted(read + held_out) == list(range(len(batches.sequences)))
    assert [batches.epochs(sample) for sample in (0, 35, 52)] == [{"train": epoch} for epoch in (0, 1, 52 / 35)]
    assert batches.describe_epochs(52) == "epoch 1.49"


@given(st.integers(1, 4), st.integers(1, 4))
def test_held_out_sequences_are_the_same_in_every_layout(data_ranks: int, per_microbatch: int) -> None:
    """Ranks take turns; the end is filled with sequences in which nothing counts."""
    batches = small(40, 5)
    rounds = -(-5 // (data_ranks * per_microbatch))
    parts = [batches.eval_batch(start * per_microbatch, per_microbatch) for start in range(rounds * data_ranks)]
    rows = [(int(part.sequences[row]), part.labels[row]) for part in parts for row in range(per_microbatch)]
    assert [number for number, _ in rows if number >= 0] == batches.eval_batch(0, 5).sequences.tolist()
    assert all((labels == IGNORE).all() == (number < 0) for number, labels in rows)


def test_hashes_tell_corpora_apart() -> None:
    assert small(40).step_hash(0, 4) != small(41).step_hash(0, 4)
    assert small(40).step_hash(0, 4) != small(40).step_hash(4, 4)
    assert small(40).step_hash(0, 4) != small(40, seed=1).step_hash(0, 4)


@pytest.mark.parametrize(("microbatch", "rank"), [(2, 0), (-1, 0), (0, 3), (0, -1)])
def test_a_place_outside_the_step_is_refused(microbatch: int, rank: int) -> None:
    with pytest.raises(ValueError, match="no microbatch"):
        small().microbatch(0, microbatch, rank, 3, 1, 2)


def test_a_corpus_too_small_to_hold_out_is_refused() -> None:
    with pytest.raises(BadInput, match=r"eval\.sequences=41 leaves none of 41"):
        small(41, 41)


def test_seeking_far_into_a_large_store(tmp_path: Path) -> None:
    """Sample 10^9 of a store of 2 x 10^10 sequences: 320 GB of tokens that take no space, read nowhere but there."""
    seq_len, num_sequences = 8, 2 * 10**10
    num_tokens = seq_len * num_sequences + 1
    index = StoreIndex(
        fingerprint="large", tokenizer="bytes", vocab_size=257, eos_id=256, token_bytes=2, num_tokens=num_tokens,
        num_documents=1, source_bytes=num_tokens, tokens_sha256="", documents_sha256="",
    )  # fmt: skip
    (tmp_path / INDEX_FILE).write_text(index.model_dump_json())
    (tmp_path / DOCUMENTS_FILE).write_bytes(np.array([0, num_tokens], dtype="<i8").tobytes())
    (tmp_path / TOKENS_FILE).touch()
    os.truncate(tmp_path / TOKENS_FILE, 2 * num_tokens)
    batches = batches_of(
        corpus_of(open_store(tmp_path)), seq_len=seq_len, attend_across_documents=False, eval_sequences=1000, seed=3
    )
    sample = 10**9
    sequence = int(batches.step_samples(sample, 1)[0])
    with (tmp_path / TOKENS_FILE).open("r+b") as stream:
        stream.seek(2 * sequence * seq_len)
        stream.write(np.arange(1, seq_len + 2, dtype="<u2").tobytes())
    batch = batches.microbatch(sample - 2, 1, 0, 1, 2, 2)
    assert batch.tokens[0].tolist() == list(range(1, seq_len + 1))
    assert batch.labels[0].tolist() == list(range(2, seq_len + 2))
