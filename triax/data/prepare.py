"""How does a corpus become a store of tokens, once?

A store is named by its fingerprint: the contents of the files in order, how they are read, and the tokenizer. Neither
paths nor times are part of it, so a corpus that was moved, copied or checked out again finds its tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from triax.data.content import identify, require_unchanged
from triax.data.parts import Job, TornPart, plan_jobs, read_parts, remove_parts, start_parts
from triax.data.pieces import SPAN_BYTES, Piece, SourceFile, Span
from triax.data.processes import make_all_parts, usable_cores
from triax.data.source import read_span, spans_of
from triax.data.store import FORMAT_VERSION, StoreWriter, TokenStore, TornStore, cannot_write, token_dtype, verify_store
from triax.data.tokenise import DocumentTokens, batches_of_pieces
from triax.data.tokenizer import Tokenizer
from triax.errors import BadInput, TriaxError
from triax.spec.value import fingerprint

Progress = Callable[[int, int], None]
"""Called with the bytes of text done and to do, after each batch of documents."""

_MOST_TRIES: Final = 3
"""Parts that were whole when they were written and are not when they are read: the disk does not keep what it gets."""


def prepare(
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    cache_folder: Path,
    *,
    text_field: str = "text",
    num_processes: int | None = None,
    progress: Progress | None = None,
) -> TokenStore:
    """Return the tokens of ``files``, each document followed by the end-of-document id; from the cache if it has them.

    A cached store that is damaged is made again. Any number of processes may prepare the same corpus at once: each ends
    with a whole store. A large corpus is tokenised by ``num_processes`` (absent: one for each core), and what is
    finished is kept when they are killed. Raises BadInput for a corpus that is broken, empty or changes meanwhile, and
    where the cache cannot be written; then nothing is left behind, but for whole parts where a disk was full.
    """
    paths = [file.path for file in files]
    stamps, hashes = identify(paths, cache_folder)
    identity = _identity(files, hashes, tokenizer, text_field)
    folder = cache_folder / "tokens" / identity
    with suppress(TornStore):  # or none yet
        return verify_store(folder)
    spans = [(file, span) for file in files for span in spans_of(file, text_field)]
    total_bytes = sum(size for size, *_ in stamps)
    dtype = token_dtype(tokenizer.vocab_size)
    jobs = plan_jobs(spans, text_field, dtype, cache_folder, identity)
    is_large = total_bytes > SPAN_BYTES

    def done(num_bytes: int) -> None:
        if progress is not None:
            progress(num_bytes, total_bytes)

    for _ in range(_MOST_TRIES):
        try:
            with StoreWriter(folder, dtype) as writer:
                if is_large:
                    _tokenise_in_parts(writer, jobs, tokenizer, num_processes or usable_cores(), done)
                else:
                    _tokenise(writer, spans, tokenizer, text_field, done)
                if not writer.num_documents:
                    raise BadInput(_no_text(files, total_bytes))
                require_unchanged(paths, stamps)
                store = writer.publish(identity, tokenizer, total_bytes)
        except TornPart:
            continue
        except BadInput:
            remove_parts(jobs)
            raise
        except OSError as error:
            with suppress(TornStore):  # another process was faster, and removed the parts
                return verify_store(folder)
            raise cannot_write(cache_folder, total_bytes * dtype.itemsize, error, keeps_parts=is_large) from None
        remove_parts(jobs)
        return store
    raise TriaxError(f"{jobs[0].folder} does not keep what is written there: set data.cache_dir to another disk.")


def _identity(files: Sequence[SourceFile], hashes: Sequence[str], tokenizer: Tokenizer, text_field: str) -> str:
    """Return 16 hexadecimal digits that name the tokens of ``files``, whose contents have the SHA-256 ``hashes``."""
    contents = [
        [file.format, None if file.format == "text" else text_field, content]
        for file, content in zip(files, hashes, strict=True)
    ]
    return fingerprint({"format_version": FORMAT_VERSION, "tokenizer": tokenizer.fingerprint, "contents": contents})


def _tokenise(
    writer: StoreWriter,
    spans: Iterable[tuple[SourceFile, Span]],
    tokenizer: Tokenizer,
    text_field: str,
    done: Callable[[int], None],
) -> None:
    """Write the tokens of a small corpus; the tokenizer spreads texts over the cores."""
    documents = DocumentTokens(tokenizer)
    for batch in batches_of_pieces(_pieces(spans, text_field)):
        writer.append(*documents.of(batch))
        done(batch.bytes_read)


def _pieces(spans: Iterable[tuple[SourceFile, Span]], text_field: str) -> Iterator[Piece]:
    """Yield the pieces of all files, with the bytes of all that were read."""
    bytes_before = 0
    for file, span in spans:
        for piece in read_span(file, text_field, span):
            yield replace(piece, bytes_read=bytes_before + piece.bytes_read)
        bytes_before += span.num_bytes


def _tokenise_in_parts(
    writer: StoreWriter, jobs: Sequence[Job], tokenizer: Tokenizer, num_processes: int, done: Callable[[int], None]
) -> None:
    """Write the tokens of a large corpus by way of parts, which outlive this process; raise TornPart where one does
    not."""
    start_parts(jobs)
    make_all_parts(jobs, tokenizer, num_processes, done)
    for tokens, ends in read_parts(jobs):
        writer.append(tokens, ends)


def _no_text(files: Sequence[SourceFile], total_bytes: int) -> str:
    what = str(files[0].path) if len(files) == 1 else f"its {len(files):,} files"
    return f"The corpus holds no text: {what} with {total_bytes:,} bytes yield no document with a token."
