"""Which numbers does a data rank feed to the model in one microbatch?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from triax.data.corpus import Corpus, Source
from triax.data.mixture import MixedOrder, Mixture
from triax.data.order import Indices, SampleOrder, sample_hash
from triax.data.packing import IGNORE, JoinedSequences, PackedSequences
from triax.errors import BadInput


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


def filled(batch: Batch, length: int) -> Batch:
    """Return ``batch`` with sequences of ``length`` positions: what they lack is a last document of each, in which no
    label counts."""
    rows, seq_len = batch.tokens.shape
    lacking = length - seq_len
    if not lacking:
        return batch
    starts = np.arange(rows) * seq_len if batch.cu_seqlens is None else batch.cu_seqlens[:-1]
    ends_of_rows = np.arange(1, rows + 1) * length
    bounds = np.concatenate((starts + starts // seq_len * lacking, ends_of_rows - lacking, ends_of_rows[-1:]))
    wider = ((0, 0), (0, lacking))
    return replace(
        batch,
        tokens=np.pad(batch.tokens, wider),
        labels=np.pad(batch.labels, wider, constant_values=IGNORE),
        positions=np.concatenate((batch.positions, np.tile(np.arange(lacking), (rows, 1))), axis=1),
        cu_seqlens=np.sort(bounds).astype(np.int32),
    )


@dataclass(frozen=True, slots=True)
class Batches:
    """Microbatches by number.

    The sample at place j of microbatch m on data rank r is
    ``first_sample + (m * data_ranks + r) * sequences_per_microbatch + j``, so a step has the same
    samples however it is cut.
    """

    corpus: Corpus
    sequences: JoinedSequences
    order: MixedOrder

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
        return sample_hash(samples, f"{self.corpus.fingerprint} {self.sequences.seq_len}")

    def epochs(self, sample: int) -> dict[str, float]:
        """Return how often the training sequences of each source, by its name, were read when ``sample`` is next."""
        names = (source.name for source in self.corpus.sources)
        return dict(zip(names, self.order.epochs(sample), strict=True))

    def describe_epochs(self, sample: int) -> str:
        """Return ``epochs`` as logs say it: ``epoch 0.42``, or ``epochs web 0.42, code 1.73`` for several sources."""
        epochs = self.epochs(sample)
        if len(epochs) == 1:
            return f"epoch {next(iter(epochs.values())):.2f}"
        return "epochs " + ", ".join(f"{name} {epoch:.2f}" for name, epoch in epochs.items())

    def exhausted(self, first_sample: int, stop_sample: int) -> dict[str, int]:
        """Return the sources whose last unread sequence is among samples first to stop - 1, and how often it was."""
        before, after = self.order.whole_epochs(first_sample), self.order.whole_epochs(stop_sample)
        names = (source.name for source in self.corpus.sources)
        return {name: last for name, first, last in zip(names, before, after, strict=True) if last > first}

    def source_of(self, sequence: int) -> Source:
        """Return the source that the sequence numbered ``sequence`` belongs to."""
        for source, order in zip(self.corpus.sources, self.order.orders, strict=True):
            if sequence < order.num_sequences:
                return source
            sequence -= order.num_sequences
        raise IndexError(f"no sequence {sequence} beyond the last")

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
    corpus: Corpus, *, seq_len: int, attend_across_documents: bool, eval_sequences: int, seed: int
) -> Batches:
    """Return the microbatches of a run over ``corpus``; raise BadInput where it is too small for the run."""
    sources = corpus.sources
    parts = [_parts(source, seq_len, attend_across_documents, is_alone=len(sources) == 1) for source in sources]
    total = sum(source.weight for source in sources)
    order = MixedOrder(
        Mixture(tuple(source.weight / total for source in sources), seed),
        tuple(
            _order(source, sum(map(len, its)), eval_sequences, seed, is_alone=len(sources) == 1)
            for source, its in zip(sources, parts, strict=True)
        ),
        eval_sequences,
        holds_out_its_own=any(source.eval_sequences is not None for source in sources),
    )
    return Batches(corpus, JoinedSequences.of(part for its in parts for part in its), order)


def _parts(source: Source, seq_len: int, attend_across_documents: bool, *, is_alone: bool) -> list[PackedSequences]:
    """Return the sequences of the stores of ``source`` that are long enough to have one."""
    long_enough = [store for store in source.stores if store.index.num_tokens > seq_len]
    if not long_enough and not is_alone:
        most = max(store.index.num_tokens for store in source.stores)
        raise BadInput(
            f"Source {source.name} has {most:,} tokens, fewer than one sequence of data.seq_len={seq_len:,} and the "
            f"token after it: give it more text, or leave it out."
        )
    return [PackedSequences(store, seq_len, attend_across_documents) for store in long_enough or source.stores[:1]]


def _order(source: Source, num_sequences: int, eval_sequences: int, seed: int, *, is_alone: bool) -> SampleOrder:
    """Return the order of one source, which does not depend on the others."""
    held_out = eval_sequences if source.eval_sequences is None else source.eval_sequences
    if held_out >= num_sequences and not is_alone:
        asked = "eval.sequences" if source.eval_sequences is None else "its eval_sequences"
        raise BadInput(
            f"{asked}={held_out:,} leaves none of the {num_sequences:,} sequences of source {source.name} to train on: "
            f"give each [[data.source]] eval_sequences of its own, at most {num_sequences - 1:,} for this one."
        )
    return SampleOrder(num_sequences, held_out, seed)
