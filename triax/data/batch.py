"""Which numbers does a data rank feed to the model in one microbatch?"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from triax.data.order import Indices, SampleOrder, sample_hash
from triax.data.packing import IGNORE, PackedSequences
from triax.data.store import TokenStore


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one microbatch on one data rank: B sequences of S tokens."""

    tokens: npt.NDArray[np.int64]
    """(B, S)"""
    labels: npt.NDArray[np.int64]
    """(B, S): already shifted; IGNORE (-100) does not count"""
    positions: npt.NDArray[np.int64]
    """(B, S)"""
    cu_seqlens: npt.NDArray[np.int32] | None
    """(documents + 1,): cuts the flattened batch, from 0 to B*S, into documents that attention never crosses; None
    where each sequence is one document"""
    sequences: Indices
    """(B,): the number of each sequence in the corpus; -1 where a sequence only fills the batch"""


@dataclass(frozen=True, slots=True)
class Batches:
    """Microbatches by number.

    The sample at place j of microbatch m on data rank r is
    ``first_sample + (m * data_ranks + r) * sequences_per_microbatch + j``, so a step has the same
    samples however it is cut.
    """

    sequences: PackedSequences
    order: SampleOrder

    def microbatch(
        self,
        first_sample: int,
        microbatch: int,
        data_rank: int,
        data_ranks: int,
        sequences_per_microbatch: int,
        microbatches: int,
    ) -> Batch:
        """Return what ``data_rank`` of ``data_ranks`` reads in one of the ``microbatches`` of a step.

        ``first_sample`` is the step's first sample, counted from the start of the run.
        """
        if not (0 <= microbatch < microbatches and 0 <= data_rank < data_ranks):
            raise ValueError(f"no microbatch {microbatch} of {microbatches} on data rank {data_rank} of {data_ranks}")
        first = first_sample + (microbatch * data_ranks + data_rank) * sequences_per_microbatch
        return self._batch(self.step_samples(first, sequences_per_microbatch))

    def step_samples(self, first_sample: int, sequences_per_step: int) -> Indices:
        """Return the sequences (sequences_per_step,) of a step, in the order of their samples."""
        return self.order.train(np.arange(first_sample, first_sample + sequences_per_step))[1]

    def step_hash(self, first_sample: int, sequences_per_step: int) -> str:
        """Return 16 hexadecimal digits that name the text of a step: the same in every layout."""
        samples = self.step_samples(first_sample, sequences_per_step)
        return sample_hash(samples, f"{self.sequences.store.index.fingerprint} {self.sequences.seq_len}")

    def epoch(self, sample: int) -> float:
        """Return how often all training sequences were read when ``sample`` is next."""
        return sample / self.order.epoch_sequences

    def eval_batch(self, first: int, count: int) -> Batch:
        """Return ``count`` held-out sequences from the one numbered ``first`` on.

        Beyond the last, sequences in which no label counts fill the batch, as every rank must take part in every
        collective.
        """
        held_out = self.order.held_out(np.arange(first, min(first + count, self.order.eval_sequences)))
        return self._batch(np.concatenate((held_out, np.full(count - len(held_out), -1))))

    def _batch(self, numbers: Indices) -> Batch:
        rows = [self.sequences[max(0, int(number))] for number in numbers]
        labels = np.stack([row.labels for row in rows])
        labels[numbers < 0] = IGNORE
        return Batch(
            tokens=np.stack([row.tokens for row in rows]),
            labels=labels,
            positions=np.stack([row.positions for row in rows]),
            cu_seqlens=self._cu_seqlens([row.document_lengths for row in rows]),
            sequences=numbers,
        )

    def _cu_seqlens(self, document_lengths: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32] | None:
        if self.sequences.attend_across_documents:
            return None
        return np.cumsum(np.concatenate(([0], *document_lengths)), dtype=np.int32)


def batches_of(
    store: TokenStore, *, seq_len: int, attend_across_documents: bool, eval_sequences: int, seed: int
) -> Batches:
    """Return the microbatches of a run over ``store``; raise BadInput where it is too small for the run."""
    sequences = PackedSequences(store, seq_len, attend_across_documents)
    return Batches(sequences, SampleOrder(len(sequences), eval_sequences, seed))
