"""How does the state of a checkpoint get into tensors that lie on any number of ranks, in any layout?"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed import ProcessGroup

from triax.checkpoint.agree import Ranks
from triax.checkpoint.disk import sentence
from triax.checkpoint.format import DTYPES, Checkpoint, Manifest, block_key, dtype_name
from triax.checkpoint.state import Box, Slice, local_slices
from triax.errors import BadInput

# Every value of the first is one of the second, so that these casts keep it exactly. No other cast is made.
_EXACT_CASTS: Final = frozenset(
    {("BF16", "F32"), ("BF16", "F64"), ("F16", "F32"), ("F16", "F64"), ("F32", "F64")}
)  # fmt: skip
_MOST_NAMED: Final = 8


@dataclass(frozen=True)
class _Read:
    """A block to be read, at least in part, and the slice of a tensor that it goes to."""

    file: int
    name: str
    box: Box
    target: Slice


class _Contradiction(Exception):
    """A file holds another tensor than the manifest says."""


def load(
    checkpoint: Checkpoint,
    tensors: Mapping[str, torch.Tensor],
    group: ProcessGroup | None = None,
    *,
    unread: Collection[str] = (),
) -> None:
    """Fill ``tensors`` in place with what the checkpoint holds under their names; the layout may be any.

    All ranks of ``group`` (None: the default group) call it together, each with the tensors it holds. Together they
    must name every tensor of the checkpoint, except those whose names begin with a word of ``unread``: for generating
    text, ``unread=("optimizer.",)``. The bits are those that were saved; a tensor of a wider floating type takes the
    values exactly (bf16 and fp16 into fp32 and fp64, fp32 into fp64); no other type than the saved one is filled. Each
    rank reads only what it holds, file by file and block by block.

    The files are trusted: call verify.verified or newest_verified before. Raises BadInput, on every rank, with all
    names that are missing, too many, or of another shape or type, before anything is changed; and if a file cannot be
    read, and then the tensors are undefined.
    """
    ranks = Ranks.of(group)
    manifest = checkpoint.manifest
    reads: list[_Read] = []
    problems = []
    for name, tensor in tensors.items():
        try:
            reads += _reads(manifest, name, tensor)
        except BadInput as error:
            problems.append(str(error))
    problems = ranks.union(problems) + _surplus(manifest, tensors, unread, ranks)
    if problems:
        rest = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise BadInput(f"{checkpoint.folder} does not fit: {'; '.join(problems[:_MOST_NAMED])}{rest}.")
    failures = []
    try:
        _fill(checkpoint, reads)
    except BadInput as error:
        failures.append(str(error))
    if failures := ranks.union(failures):
        raise BadInput(failures[0])


def read_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Return one tensor of the manifest, whole, in host memory, with the bits that were saved.

    The files are trusted, as in ``load``. Raises BadInput if they cannot be read.
    """
    entry = checkpoint.manifest.tensors[name]
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    _fill(checkpoint, _reads(checkpoint.manifest, name, tensor))
    return tensor


def read_rows(checkpoint: Checkpoint, name: str, rows: range) -> torch.Tensor:
    """Return consecutive ``rows`` of one tensor, read alone; see ``read_tensor``."""
    entry = checkpoint.manifest.tensors[name]
    shape = (len(rows), *entry.shape[1:])
    tensor = torch.empty(shape, dtype=DTYPES[entry.dtype])
    piece = Slice((rows.start, *(0 for _ in shape[1:])), shape, tensor)
    _fill(checkpoint, [_Read(file, name, box, piece) for box, file in entry.blocks_touching(piece.box)])
    return tensor


def _reads(manifest: Manifest, name: str, tensor: torch.Tensor) -> list[_Read]:
    """Return what must be read for one tensor of this rank; raise BadInput, a clause, if it does not fit."""
    entry = manifest.tensors.get(name)
    if entry is None:
        raise BadInput(f"{name} is not in it")
    if entry.shape != tuple(tensor.shape):
        raise BadInput(f"{name} has shape {entry.shape} in it and {tuple(tensor.shape)} here")
    dtype = dtype_name(tensor.dtype)
    if entry.dtype != dtype and (entry.dtype, dtype) not in _EXACT_CASTS:
        raise BadInput(f"{name} is {entry.dtype} in it and {dtype} here")
    return [
        _Read(file, name, box, piece)
        for piece in local_slices(tensor)
        for box, file in entry.blocks_touching(piece.box)
    ]


def _surplus(
    manifest: Manifest, tensors: Mapping[str, torch.Tensor], unread: Collection[str], ranks: Ranks
) -> list[str]:
    """Return a clause for each tensor of the checkpoint that no rank has and that may not be left out."""
    names = sorted(manifest.tensors)
    is_wanted = ranks.maxima(*(name in tensors or name.startswith(tuple(unread)) for name in names)) if names else ()
    return [f"{name} is in it and not here" for name, wanted in zip(names, is_wanted, strict=True) if not wanted]


@torch.no_grad()
def _fill(checkpoint: Checkpoint, reads: list[_Read]) -> None:
    """Read block by block, each file opened once, and one at a time: there may be thousands. Raises BadInput."""
    try:
        for file, of_file in groupby(sorted(reads, key=lambda read: read.file), key=lambda read: read.file):
            path = checkpoint.folder / checkpoint.manifest.files[file].name
            with _opened(path) as blocks:
                for read in of_file:
                    entry = checkpoint.manifest.tensors[read.name]
                    _copy(blocks, block_key(read.name, read.box, entry.shape), read, DTYPES[entry.dtype])
    except OSError as error:
        raise BadInput(f"{checkpoint.folder} cannot be read: {sentence(error)}.") from None
    except (SafetensorError, _Contradiction) as error:
        raise BadInput(f"{checkpoint.folder} does not hold what its manifest says: {error}") from None


def _copy(blocks: Any, key: str, read: _Read, dtype: torch.dtype) -> None:
    saved = blocks.get_slice(key)
    shape = tuple(stop - start for start, stop in read.box)
    if tuple(saved.get_shape()) != shape or DTYPES.get(saved.get_dtype()) != dtype:
        raise _Contradiction(f"{key} is {saved.get_dtype()} {tuple(saved.get_shape())} in its file.")
    shared = [
        (max(start, low), min(stop, high)) for (start, stop), (low, high) in zip(read.box, read.target.box, strict=True)
    ]
    wanted = tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(shared, read.box, strict=True))
    target = read.target.local
    for dim, ((low, high), offset) in enumerate(zip(shared, read.target.offset, strict=True)):
        target = target.narrow(dim, low - offset, high - low)
    target.copy_(saved[wanted] if wanted else blocks.get_tensor(key))


def _opened(path: Path) -> Any:
    # safetensors types its file as a context manager of nothing in particular.
    return safe_open(path, framework="pt")
