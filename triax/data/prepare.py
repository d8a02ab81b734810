"""How does a corpus become a store of tokens, once?

A store is named by its fingerprint: the contents of the files in order, how they are read, and the tokenizer. Neither
paths nor times are part of it, so a corpus that was moved, copied or checked out again finds its tokens.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from triax.data.content import hash_files, stamp
from triax.data.source import Piece, SourceFile, read_pieces
from triax.data.store import FORMAT_VERSION, StoreWriter, TokenStore, TornStore, token_dtype, verify_store
from triax.data.tokenizer import TokenIds, Tokenizer
from triax.errors import BadInput
from triax.spec.value import fingerprint
from triax.units import format_bytes

Progress = Callable[[int, int], None]
"""Called with the bytes of text done and to do, after each batch of documents."""

_BATCH_CHARS: Final = 1 << 21
_BATCH_PIECES: Final = 1 << 12
"""What is tokenised at once: enough to keep the cores busy, and a few hundred MiB at most inside the tokenizer."""


def prepare(
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    cache_folder: Path,
    *,
    text_field: str = "text",
    progress: Progress | None = None,
) -> TokenStore:
    """Return the tokens of ``files``, each document followed by the end-of-document id; from the cache if it has them.

    A cached store that is damaged is made again. Any number of processes may prepare the same corpus at once: each ends
    with a whole store. Raises BadInput for a corpus that is broken, empty or changes meanwhile, and where the cache
    cannot be written; then nothing is left behind.
    """
    name = fingerprint([str(file.path.absolute()) for file in files])
    stamps = [stamp(file.path) for file in files]
    memo_path = cache_folder / "contents" / f"{name}.json"
    with suppress(OSError):  # it is said when there is something that must be written
        memo_path.parent.mkdir(parents=True, exist_ok=True)
    hashes = hash_files([file.path for file in files], memo_path)
    identity = _identity(files, hashes, tokenizer, text_field)
    folder = cache_folder / "tokens" / identity
    with suppress(TornStore):  # or none yet
        return verify_store(folder)
    total_bytes = sum(size for size, *_ in stamps)
    try:
        with StoreWriter(folder, token_dtype(tokenizer.vocab_size)) as writer:
            _write_tokens(writer, files, tokenizer, text_field, total_bytes, progress)
            for file, before in zip(files, stamps, strict=True):
                if stamp(file.path) != before:
                    raise BadInput(f"{file.path} was changed while it was read: start again when it is complete.")
            return writer.publish(identity, tokenizer, total_bytes)
    except OSError as error:
        raise BadInput(_cannot_write(cache_folder, total_bytes, tokenizer, error)) from None


def _identity(files: Sequence[SourceFile], hashes: Sequence[str], tokenizer: Tokenizer, text_field: str) -> str:
    """Return 16 hexadecimal digits that name the tokens of ``files``, whose contents have the SHA-256 ``hashes``."""
    contents = [
        [file.format, text_field if file.format == "jsonl" else None, content]
        for file, content in zip(files, hashes, strict=True)
    ]
    return fingerprint({"format_version": FORMAT_VERSION, "tokenizer": tokenizer.fingerprint, "contents": contents})


def _write_tokens(
    writer: StoreWriter,
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    text_field: str,
    total_bytes: int,
    progress: Progress | None,
) -> None:
    eos = np.array([tokenizer.eos_id], dtype=np.uint32)
    # Tokens so far of the document under way. A document without any is left out, its end too.
    document_tokens = 0
    for pieces, done_bytes in _batches(files, text_field):
        parts: list[TokenIds] = []
        ends: list[int] = []
        length = 0
        for piece, ids in zip(pieces, tokenizer.encode_batch([piece.text for piece in pieces]), strict=True):
            parts.append(ids)
            length += len(ids)
            document_tokens += len(ids)
            if piece.ends_document and document_tokens:
                parts.append(eos)
                length += 1
                ends.append(length)
                document_tokens = 0
        writer.append(np.concatenate(parts), ends)
        if progress is not None:
            progress(done_bytes, total_bytes)
    if not writer.num_documents:
        what = str(files[0].path) if len(files) == 1 else f"its {len(files):,} files"
        raise BadInput(f"The corpus holds no text: {what} with {total_bytes:,} bytes yield no document with a token.")


def _batches(files: Sequence[SourceFile], text_field: str) -> Iterator[tuple[list[Piece], int]]:
    """Yield pieces, across files, some MiB at a time, with the bytes of the corpus read up to their end."""
    pieces: list[Piece] = []
    chars = files_bytes = 0
    for file in files:
        bytes_read = 0
        for piece in read_pieces(file, text_field):
            pieces.append(piece)
            chars += len(piece.text)
            bytes_read = piece.bytes_read
            if chars >= _BATCH_CHARS or len(pieces) >= _BATCH_PIECES:
                yield pieces, files_bytes + bytes_read
                pieces, chars = [], 0
        files_bytes += bytes_read
    if pieces:
        yield pieces, files_bytes


def _cannot_write(cache_folder: Path, total_bytes: int, tokenizer: Tokenizer, error: OSError) -> str:
    """Say why the cache cannot be written, and what would help."""
    most = format_bytes(total_bytes * token_dtype(tokenizer.vocab_size).itemsize)
    reason = error.strerror or str(error)
    message = f"Prepared tokens cannot be written to {cache_folder}: {reason}; up to {most} are needed there"
    with suppress(OSError):  # the folder could not even be made
        message += f" and {format_bytes(shutil.disk_usage(cache_folder).free)} are free"
    return f"{message}: make room, or set data.cache_dir to another folder."
