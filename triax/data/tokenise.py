"""How do pieces of text become tokens and ends of documents, some MiB at a time?"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from triax.data.pieces import Piece
from triax.data.tokenizer import TokenIds, Tokenizer

BATCH_CHARS: Final = 1 << 21
BATCH_PIECES: Final = 1 << 12
"""What is tokenised at once: enough to keep the cores busy, and a few hundred MiB at most inside the tokenizer."""


@dataclass(frozen=True, slots=True)
class PieceBatch:
    """Pieces that are tokenised at once."""

    pieces: tuple[Piece, ...]
    num_chars: int

    @property
    def bytes_read(self) -> int:
        """Bytes of the source that were read up to its end."""
        return self.pieces[-1].bytes_read

    @property
    def ends_document(self) -> bool:
        """Whether no document goes on behind it."""
        return self.pieces[-1].ends_document


def batches_of_pieces(pieces: Iterable[Piece]) -> Iterator[PieceBatch]:
    """Yield ``pieces`` some MiB at a time."""
    batch: list[Piece] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= BATCH_CHARS or len(batch) >= BATCH_PIECES:
            yield PieceBatch(tuple(batch), chars)
            batch, chars = [], 0
    if batch:
        yield PieceBatch(tuple(batch), chars)


class DocumentTokens:
    """The tokens of documents that come in pieces, each document followed by its end.

    A document without any token is left out, its end too.
    """

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = False) -> None:
        """Begin; ``continues`` says that the first piece goes on with a document that has tokens already."""
        self._tokenizer = tokenizer
        self._eos = np.array([tokenizer.eos_id], dtype=np.uint32)
        self._has_tokens = continues

    def of(self, batch: PieceBatch) -> tuple[TokenIds, list[int]]:
        """Return the tokens (T,) of the next pieces, and behind how many of them each document ends."""
        parts: list[TokenIds] = []
        ends: list[int] = []
        length = 0
        texts = [piece.text for piece in batch.pieces]
        for piece, ids in zip(batch.pieces, self._tokenizer.encode_batch(texts), strict=True):
            parts.append(ids)
            length += len(ids)
            self._has_tokens = self._has_tokens or len(ids) > 0
            if piece.ends_document and self._has_tokens:
                parts.append(self._eos)
                length += 1
                ends.append(length)
                self._has_tokens = False
        return np.concatenate(parts), ends
