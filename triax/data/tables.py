"""How are Parquet files, and the Arrow files of Hugging Face ``datasets``, read? A row is a document, in one column."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from triax.data.archive import require_pyarrow
from triax.data.pieces import Piece, SourceFile, Span, listed, pieces_of, spans_by_size, text_fault
from triax.errors import BadInput

_BATCH_ROWS: Final = 256
"""Rows in memory at once, in a file with long ones."""

_ARROW_FILE_MAGIC: Final = b"ARROW1"
_ARROW_STREAM_END: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""Without this check, a stream that was cut between two batches would pass for a shorter one."""


def parquet_spans(file: SourceFile, text_field: str) -> list[Span]:
    """Return the spans of a Parquet file, in row groups; raise BadInput where it has no column ``text_field``."""
    with _parquet(file.path) as parquet:
        _require_column(file.path, parquet.schema_arrow, text_field)
        groups = (parquet.metadata.row_group(group) for group in range(parquet.metadata.num_row_groups))
        return spans_by_size((group.total_byte_size for group in groups), file.path.stat().st_size)


def read_parquet(file: SourceFile, text_field: str, span: Span) -> Iterator[Piece]:
    """Yield the documents of the row groups of ``span``."""
    with _parquet(file.path) as parquet:
        _require_column(file.path, parquet.schema_arrow, text_field)
        groups = range(span.start, span.stop)
        sizes = [parquet.metadata.row_group(group).num_rows for group in range(span.stop)]
        first_row, num_rows = sum(sizes[: span.start]), sum(sizes[span.start :])
        batches = parquet.iter_batches(_BATCH_ROWS, row_groups=groups, columns=[text_field])
        yield from _documents(file.path, text_field, batches, first_row, num_rows, span.num_bytes)


def arrow_spans(file: SourceFile, text_field: str) -> list[Span]:
    """Return the spans of an Arrow file, in record batches; raise BadInput where it has no column ``text_field``."""
    with _arrow(file.path, text_field) as batches:
        return spans_by_size((batch.nbytes for batch in batches), file.path.stat().st_size)


def read_arrow(file: SourceFile, text_field: str, span: Span) -> Iterator[Piece]:
    """Yield the documents of the record batches of ``span``."""
    with _arrow(file.path, text_field) as batches:
        first_row = num_rows = 0
        inside = []
        for number, batch in enumerate(batches):  # mapped: what is not looked at is not read
            if number >= span.stop:
                break
            if number < span.start:
                first_row += batch.num_rows
            else:
                inside.append(batch)
                num_rows += batch.num_rows
        yield from _documents(file.path, text_field, iter(inside), first_row, num_rows, span.num_bytes)


def _documents(
    path: Path, text_field: str, batches: Iterator[Any], first_row: int, num_rows: int, num_bytes: int
) -> Iterator[Piece]:
    row = 0
    for batch in batches:
        for values in _slices(batch.column(text_field)):
            try:
                texts = values.to_pylist()
            except UnicodeDecodeError:
                raise BadInput(
                    f"{path}, rows {first_row + row + 1:,} to {first_row + row + len(values):,}: field "
                    f"{text_field!r} holds bytes that are not UTF-8."
                ) from None
            for text in texts:
                row += 1
                if fault := text_fault(text, text_field):
                    raise BadInput(f"{path}, row {first_row + row:,}: {fault}.")
                yield from pieces_of(text, num_bytes * row // num_rows)


def _slices(column: Any) -> Iterator[Any]:
    """Yield a column in parts of few rows: as Python objects they take several times their bytes."""
    for start in range(0, len(column), _BATCH_ROWS):
        yield column.slice(start, _BATCH_ROWS)


def _require_column(path: Path, schema: Any, text_field: str) -> None:
    if schema.names.count(text_field) != 1:
        has = "has several columns" if text_field in schema.names else "has no column"
        columns = listed(schema.names) or "none"
        raise BadInput(f"{path} {has} {text_field!r}; its columns are {columns}: see data.text_field.")
    its_type = str(schema.field(text_field).type)
    if not re.fullmatch(r"(large_)?string(_view)?|dictionary<values=(large_)?string,.*>", its_type):
        raise BadInput(f"{path}: column {text_field!r} holds {its_type}, not text: see data.text_field.")


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    require_pyarrow(path)
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, memory_map=False, pre_buffer=False, buffer_size=1 << 20) as parquet:
            yield parquet
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, "Parquet", error) from None


@contextmanager
def _arrow(path: Path, text_field: str) -> Iterator[Iterator[Any]]:
    """Yield the record batches of a file in either of Arrow's formats."""
    require_pyarrow(path)
    import pyarrow.ipc

    try:
        with pyarrow.memory_map(str(path)) as mapped:
            if mapped.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC:
                whole = pyarrow.ipc.open_file(mapped)
                _require_column(path, whole.schema, text_field)
                yield (whole.get_batch(number) for number in range(whole.num_record_batches))
            else:
                mapped.seek(max(0, mapped.size() - len(_ARROW_STREAM_END)))
                if mapped.read() != _ARROW_STREAM_END:
                    raise pyarrow.ArrowInvalid("its stream has no end")
                mapped.seek(0)
                stream = pyarrow.ipc.open_stream(mapped)
                _require_column(path, stream.schema, text_field)
                yield iter(stream)
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, "Arrow", error) from None


def _unreadable(path: Path, what: str, error: Exception) -> BadInput:
    if isinstance(error, OSError) and error.errno is not None:
        return BadInput(f"{path} cannot be read: {error.strerror or error}.")
    reason = " ".join(str(error).split())[:200].rstrip(".")
    return BadInput(f"{path} is no whole {what} file: {reason}; fetch or write it again.")
