"""Which tokens, labels and documents make up the sequence of a given number?

All documents stand one after another; sequence k is the window of ``seq_len`` tokens from ``k * seq_len`` on. Labels
are already shifted: the label of a token is the token after it, also for the last one of a window. So no later cut of
the sequence, by context or by tensor parallelism, has to look across its edge.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

from triax.data.store import TokenStore
from triax.errors import BadInput

IGNORE: Final = -100
"""The label of a token whose prediction does not count; the value torch's cross-entropy ignores."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One window of a corpus: S tokens."""

    tokens: npt.NDArray[np.int64]
    """(S,)"""
    labels: npt.NDArray[np.int64]
    """(S,): the next token, or IGNORE where a document ends and is not to be looked beyond"""
    positions: npt.NDArray[np.int64]
    """(S,): from 0, again from 0 at each document"""
    document_lengths: npt.NDArray[np.int32]
    """(documents,): tokens of each document, or part of one, in the window; they sum to S"""


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """A store of tokens, cut into sequences of ``seq_len``.

    With ``attend_across_documents`` a sequence counts as one document. Without, attention and loss stay inside each:
    its positions start at 0, and its last token predicts nothing, since what follows it is another document.
    """

    store: TokenStore
    seq_len: int
    attend_across_documents: bool

    def __post_init__(self) -> None:
        if len(self) == 0:
            raise BadInput(
                f"The corpus has {self.store.index.num_tokens:,} tokens, fewer than one sequence of "
                f"data.seq_len={self.seq_len:,} and the token after it: give more text, or set data.seq_len to "
                f"{self.store.index.num_tokens - 1:,} or less."
            )

    def __len__(self) -> int:
        """Whole sequences, each with a token after it to predict; what is left over at the end is not read."""
        return (self.store.index.num_tokens - 1) // self.seq_len

    def __getitem__(self, sequence: int) -> TokenSequence:
        """Return the sequence numbered ``sequence``, from 0."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"sequence {sequence} is not in range({len(self)})")
        start, stop = sequence * self.seq_len, (sequence + 1) * self.seq_len
        window = self.store.tokens[start : stop + 1].astype(np.int64)
        tokens, labels = window[:-1], window[1:].copy()
        starts = np.zeros(1, dtype=np.int64)
        if not self.attend_across_documents:
            # Documents that start inside the window, or right behind it.
            first, last = np.searchsorted(self.store.document_starts, (start + 1, stop + 1))
            inside = np.asarray(self.store.document_starts[first:last]) - start
            labels[inside - 1] = IGNORE
            starts = np.concatenate((starts, inside[inside < self.seq_len]))
        lengths = np.diff(starts, append=self.seq_len)
        positions = np.arange(self.seq_len) - np.repeat(starts, lengths)
        return TokenSequence(tokens, labels, positions, lengths.astype(np.int32))


@dataclass(frozen=True, slots=True)
class JoinedSequences:
    """The sequences of several stores, one store after another; none reaches from one store into the next."""

    parts: tuple[PackedSequences, ...]
    lasts: tuple[int, ...]
    """Of each part: how many sequences it and those before it have."""

    @classmethod
    def of(cls, parts: Iterable[PackedSequences]) -> "JoinedSequences":
        """Return the sequences of ``parts``, of which there is at least one; all are cut alike."""
        parts = tuple(parts)
        return cls(parts, tuple(accumulate(map(len, parts))))

    @property
    def seq_len(self) -> int:
        """Tokens in one sequence."""
        return self.parts[0].seq_len

    @property
    def attend_across_documents(self) -> bool:
        """Whether a sequence counts as one document."""
        return self.parts[0].attend_across_documents

    def __len__(self) -> int:
        return self.lasts[-1]

    def __getitem__(self, sequence: int) -> TokenSequence:
        """Return the sequence numbered ``sequence``, from 0."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"sequence {sequence} is not in range({len(self)})")
        part = bisect_right(self.lasts, sequence)
        return self.parts[part][sequence - (self.lasts[part - 1] if part else 0)]
