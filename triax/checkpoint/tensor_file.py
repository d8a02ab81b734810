"""What lies where in a safetensors file, and can its header be believed?

The format (huggingface/safetensors, README "Format"): eight bytes with the length of the header, a JSON object, and the
bytes of all tensors without a gap. Files from elsewhere are read here and not by the library, because a tensor that is
only copied needs no more memory than a buffer, and because each fault gets its sentence.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy
import torch

from triax.checkpoint.disk import open_regular, sentence
from triax.checkpoint.format import DTYPES
from triax.errors import BadInput
from triax.spec.text_file import parse_json

_LARGEST_HEADER_BYTES: Final = 32 << 20
"""About 200,000 tensors. The library reads up to 100 MB, which as Python's objects would take gigabytes."""
_BUFFER_BYTES: Final = 16 << 20
_NAME: Final = re.compile(r"[^\x00-\x1f]{1,512}")


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file, as its header says."""

    path: Path
    dtype: str
    """A name of the format; format.DTYPES has those that torch computes with and triax stores."""
    shape: tuple[int, ...]
    begin: int
    """Position of its first byte in the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a stored tensor: all of it, or the part that is one of several weights fused into it."""

    stored: Stored
    first: int
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of these rows."""
        return math.prod(self.shape) * DTYPES[self.stored.dtype].itemsize

    @property
    def begin(self) -> int:
        """Position of their first byte in the file."""
        row_bytes = math.prod(self.stored.shape[1:]) * DTYPES[self.stored.dtype].itemsize
        return self.stored.begin + self.first * row_bytes

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes piece by piece, each in the same buffer: use one before asking for the next.

        Raises BadInput where the file cannot be read or has become shorter.
        """
        buffer = memoryview(bytearray(min(_BUFFER_BYTES, self.num_bytes)))
        left = self.num_bytes
        try:
            with open_regular(self.stored.path) as file:
                file.seek(self.begin)
                while left:
                    piece = buffer[:left]
                    size = file.readinto(piece)
                    if not size:
                        raise BadInput(f"{self.stored.path} became shorter while it was read.")
                    yield piece[:size]
                    left -= size
        except OSError as error:
            raise BadInput(f"{self.stored.path} cannot be read: {sentence(error)}.") from None

    def tensor(self) -> torch.Tensor:
        """Return the rows as a tensor of the stored dtype, in memory of its own."""
        values = torch.empty(self.shape, dtype=DTYPES[self.stored.dtype])
        flat = values.reshape(-1).view(torch.uint8).numpy() if values.numel() else numpy.empty(0, numpy.uint8)
        done = 0
        for piece in self.chunks():
            flat[done : done + len(piece)] = numpy.frombuffer(piece, numpy.uint8)
            done += len(piece)
        return values


@dataclass(frozen=True, slots=True)
class Stacked:
    """The rows of a weight: those of its parts, one below the other. All have one dtype and equal rows."""

    parts: tuple[Rows, ...]

    @property
    def dtype(self) -> str:
        """Their dtype, a name of the format."""
        return self.parts[0].stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all rows together."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(part.num_bytes for part in self.parts)

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes piece by piece, as ``Rows.chunks`` does."""
        for part in self.parts:
            yield from part.chunks()

    def tensor(self) -> torch.Tensor:
        """Return the rows as a tensor of the stored dtype, in memory of its own."""
        return self.parts[0].tensor() if len(self.parts) == 1 else torch.cat([part.tensor() for part in self.parts])


def read_header(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file by name, in the order of their bytes.

    Raises BadInput for a file that is cut short, is of another kind, or whose header is hostile: longer than the file,
    names or sizes that no tensor has, bytes that overlap, leave a gap or lie outside the file.
    """
    try:
        with open_regular(path) as file:
            num_bytes = file.seek(0, 2)
            file.seek(0)
            begin = file.read(8)
            length = int.from_bytes(begin, "little")
            if begin.startswith(b"version "):
                raise BadInput(f"{path} is a pointer that git left in place of the file: run git lfs pull there.")
            if len(begin) < 8 or length > min(num_bytes - 8, _LARGEST_HEADER_BYTES):
                raise BadInput(
                    f"{path} is no whole safetensors file: a header of {length:,} bytes does not fit into its "
                    f"{num_bytes:,}; download it again."
                )
            text = file.read(length)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {sentence(error)}.") from None
    try:
        header = parse_json(text.decode(), f"the header of {path}")
    except UnicodeDecodeError:
        raise BadInput(f"{path} is no safetensors file: its header is no text.") from None
    header.pop("__metadata__", None)
    data_begin = 8 + length
    stored = [(name, _stored(path, name, entry, data_begin)) for name, entry in header.items()]
    stored.sort(key=lambda item: (item[1].begin, item[1].num_bytes))
    _check_order(path, stored, data_begin, num_bytes)
    return dict(stored)


def _stored(path: Path, name: str, entry: Any, data_begin: int) -> Stored:
    if _NAME.fullmatch(name) is None:
        raise BadInput(f"the header of {path} names a tensor {name!r:.80}: 1 to 512 characters, none of them control.")
    what = f"the header of {path} contradicts itself about {name!r:.80}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise BadInput(f"{what}: it says no dtype, shape and data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    is_dtype = isinstance(dtype, str) and re.fullmatch(r"[A-Z0-9_]{1,16}", dtype) is not None
    if not (is_dtype and _are_sizes(shape) and len(shape) <= 16 and _are_sizes(offsets) and len(offsets) == 2):
        raise BadInput(f"{what}: {entry!r:.200} is no tensor.")
    begin, end = offsets
    size = DTYPES[dtype].itemsize if dtype in DTYPES else None
    if begin > end or (size is not None and math.prod(shape) * size != end - begin):
        raise BadInput(f"{what}: {dtype} {tuple(shape)!r:.200} does not take the bytes from {begin:,} to {end:,}.")
    return Stored(path, dtype, tuple(shape), data_begin + begin, end - begin)


def _are_sizes(said: Any) -> bool:
    return isinstance(said, list) and all(type(size) is int and 0 <= size < 1 << 62 for size in said)


def _check_order(path: Path, stored: Sequence[tuple[str, Stored]], data_begin: int, num_bytes: int) -> None:
    """Raise BadInput unless the tensors take every byte after the header once."""
    position = data_begin
    for name, one in stored:
        if one.begin != position:
            how = "overlaps another tensor" if one.begin < position else "leaves bytes before it that belong to none"
            raise BadInput(f"the header of {path} contradicts itself: {name!r:.80} {how}.")
        position += one.num_bytes
    if position > num_bytes:
        raise BadInput(
            f"{path} was cut short: its tensors take {position:,} bytes and it has {num_bytes:,}; download it again."
        )
    if position < num_bytes:
        raise BadInput(f"{path} is no whole safetensors file: {num_bytes - position:,} bytes belong to no tensor.")


@dataclass(frozen=True, slots=True)
class FileLayout:
    """How tensors lie in a file that is to be written."""

    header: bytes
    """The first bytes of the file."""
    places: tuple[tuple[str, int, int], ...]
    """Name, begin and end of each tensor behind the header, in the order of their bytes."""

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + (self.places[-1][2] if self.places else 0)


def lay_out(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> FileLayout:
    """Return where tensors, given as (name, dtype, shape), lie in one file.

    Widest elements first, so that each tensor starts at a multiple of its element size.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places = []
    end = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -DTYPES[tensor[1]].itemsize):
        begin, end = end, end + DTYPES[dtype].itemsize * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        places.append((name, begin, end))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return FileLayout(len(text).to_bytes(8, "little") + text, tuple(places))
