"""Small corpora for tests: token stores in memory and on disk."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from triax.data.files import find_files
from triax.data.prepare import prepare
from triax.data.store import StoreIndex, TokenStore
from triax.data.tokenizer import ByteTokenizer


def memory_store(document_lengths: Sequence[int]) -> TokenStore:
    """A store in which token number i is i, so that a test reads places off tokens."""
    total = sum(document_lengths)
    index = StoreIndex(
        fingerprint=f"documents of {document_lengths}",
        tokenizer="numbers", vocab_size=total, eos_id=0, token_bytes=4, num_tokens=total,
        num_documents=len(document_lengths), source_bytes=0, tokens_sha256="", documents_sha256="",
    )  # fmt: skip
    return TokenStore(Path("memory"), index, np.arange(total, dtype=np.uint32), np.cumsum([0, *document_lengths]))


def text_store(folder: Path, texts: Sequence[str]) -> TokenStore:
    """The byte tokens of ``texts``, one file each, prepared below ``folder``."""
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (corpus / f"{number:04}.txt").write_text(text, encoding="utf-8")
    return prepare(find_files([str(corpus)]), ByteTokenizer(), folder / "cache")
