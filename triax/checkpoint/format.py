"""What does a checkpoint folder look like, and what does its manifest say?

docs/checkpoint-format.md describes the format for people. Nothing here touches the disk.
"""

import hashlib
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy
import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from triax.checkpoint.state import Box
from triax.errors import BadInput
from triax.spec.value import Value

FORMAT: Final = "triax-checkpoint"
FORMAT_VERSION: Final = 1

MANIFEST: Final = "manifest.json"
"""Written last: a folder without it is no checkpoint."""
MARKER: Final = "written-by.json"
"""Written first: says which run made the folder, so that only this run ever deletes it."""
LATEST: Final = "latest"
"""Beside the checkpoint folders: names the newest one, for people and scripts."""
MAX_MANIFEST_BYTES: Final = 1 << 30

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
"""What can be stored, by the names that safetensors gives them."""

_NAMES_OF_DTYPES: Final[Mapping[torch.dtype, str]] = {dtype: name for name, dtype in DTYPES.items()}
_FOLDER: Final = re.compile(r"step-([0-9]{8,15})(?:-([1-9][0-9]{0,3}))?")
_SHARD: Final = re.compile(r"shard-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")
_OWN_FILE: Final = re.compile(
    rf"({_SHARD.pattern}|part-[0-9]{{5,9}}\.json|{re.escape(MANIFEST)}|{re.escape(MARKER)})(\.tmp)?"
)
_NAME: Final = r"[^@\x00-\x1f]{1,512}"
# The last line and bracket of a manifest; everything before them is what the checksum is taken of.
_SEAL: Final = re.compile(rb'"sha256": "([0-9a-f]{64})"\n\}\n')
_SEAL_BYTES: Final = len('"sha256": ""\n}\n') + 64

Size = Annotated[int, Field(ge=0, lt=2**62)]


class FileEntry(Value):
    """One safetensors file of the checkpoint."""

    name: Annotated[str, Field(pattern=rf"^{_SHARD.pattern}$")]
    bytes: Size
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class TensorEntry(Value):
    """One tensor: a grid of blocks made by the cuts of each dim, and the file in which each block lies.

    A grid can neither overlap nor leave a gap, so there is nothing of the kind to check. A dim of size 5 in blocks of 3
    and 2 has cuts ``(0, 3, 5)``; a dim of size 0 has cuts ``(0,)`` and the tensor has no blocks.
    """

    dtype: str
    shape: Annotated[tuple[Size, ...], Field(max_length=16)]
    cuts: tuple[tuple[Size, ...], ...]
    files: tuple[Size, ...]
    """Position in Manifest.files for each block, in row-major order of the grid."""

    @model_validator(mode="after")
    def _is_a_grid(self) -> "TensorEntry":
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        if len(self.cuts) != len(self.shape):
            raise ValueError(f"a tensor of {len(self.shape)} dims has cuts for {len(self.cuts)}")
        for dim, (size, cuts) in enumerate(zip(self.shape, self.cuts, strict=True)):
            if not cuts or cuts[0] != 0 or cuts[-1] != size or any(a >= b for a, b in pairwise(cuts)):
                raise ValueError(f"the cuts of dim {dim} do not rise from 0 to {size}")
        blocks = math.prod(len(cuts) - 1 for cuts in self.cuts)
        if blocks != len(self.files):
            raise ValueError(f"the cuts make {blocks} blocks and files are named for {len(self.files)}")
        return self

    def blocks(self) -> Iterator[tuple[Box, int]]:
        """Yield every block: its box, and the position of its file in Manifest.files."""
        return zip(boxes(self.cuts), self.files, strict=True)

    def blocks_touching(self, box: Box) -> Iterator[tuple[Box, int]]:
        """Yield the blocks that share elements with ``box``, which lies inside the tensor and is not empty."""
        near = [
            range(bisect_right(cuts, start) - 1, bisect_right(cuts, stop - 1))
            for cuts, (start, stop) in zip(self.cuts, box, strict=True)
        ]
        for place in product(*near):
            index = 0
            for cuts, at in zip(self.cuts, place, strict=True):
                index = index * (len(cuts) - 1) + at
            yield tuple((cuts[at], cuts[at + 1]) for cuts, at in zip(self.cuts, place, strict=True)), self.files[index]


class Manifest(Value):
    """Everything about a checkpoint but the numbers themselves."""

    format: Literal["triax-checkpoint"] = FORMAT
    format_version: Literal[1] = FORMAT_VERSION
    step: Size
    run: Annotated[str, Field(max_length=256)]
    """Who wrote it: the owner that retention compares."""
    extra: dict[str, JsonValue]
    """What the writer's caller had to say: tokens, next sample, skipped ranges, fingerprint, layout, ..."""
    versions: dict[str, str]
    files: tuple[FileEntry, ...]
    tensors: dict[Annotated[str, Field(pattern=rf"^{_NAME}$")], TensorEntry]

    @model_validator(mode="after")
    def _fits_its_files(self) -> "Manifest":
        if len({file.name for file in self.files}) != len(self.files):
            raise ValueError("two files have one name")
        # In numpy, since there may be millions of blocks; in floats, since hostile sizes would overflow integers.
        needed = numpy.zeros(len(self.files))
        for name, tensor in self.tensors.items():
            if (last := max(tensor.files, default=-1)) >= len(self.files):
                raise ValueError(f"{name} lies in file number {last} of {len(self.files)}")
            sizes = numpy.array(float(DTYPES[tensor.dtype].itemsize))
            for cuts in tensor.cuts:
                sizes = numpy.multiply.outer(sizes, numpy.diff(numpy.array(cuts, dtype=float)))
            needed += numpy.bincount(numpy.array(tensor.files, dtype=int), sizes.ravel(), len(self.files))
        for file, num_bytes in zip(self.files, needed.tolist(), strict=True):
            if num_bytes > file.bytes:
                raise ValueError(f"{num_bytes:.0f} bytes of tensors cannot lie in {file.name}")
        return self

    @property
    def total_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True)
class Checkpoint:
    """A folder and the manifest that was read from it; whether its files are intact is for verify.py to say."""

    folder: Path
    manifest: Manifest
    digest: str
    """SHA-256 of manifest.json; as the manifest holds those of all files, it names the state down to the last bit."""


def boxes(cuts: tuple[tuple[int, ...], ...]) -> Iterator[Box]:
    """Yield the blocks of a grid in row-major order."""
    return product(*(pairwise(of_dim) for of_dim in cuts))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the format; raise BadInput if it cannot be stored."""
    if dtype not in _NAMES_OF_DTYPES:
        raise BadInput(
            f"{dtype} cannot be stored in a checkpoint: convert to one of {', '.join(map(str, DTYPES.values()))}."
        )
    return _NAMES_OF_DTYPES[dtype]


def check_name(name: str) -> None:
    """Raise BadInput for a tensor's name that cannot be a key of the format."""
    if re.fullmatch(_NAME, name) is None:
        raise BadInput(
            f"{name!r:.200} cannot name a tensor: 1 to 512 characters, none of them @ or a control character."
        )


def block_key(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """Return the key of a block in its safetensors file: ``weight`` if it is the whole tensor, else ``weight@4,0``."""
    if all(range_ == (0, size) for range_, size in zip(box, shape, strict=True)):
        return name
    return f"{name}@{','.join(str(start) for start, _ in box)}"


def folder_name(step: int, attempt: int = 0) -> str:
    """Return the folder of a step: ``step-00001000``, and ``step-00001000-1`` where that one exists already."""
    return f"step-{step:08d}" + (f"-{attempt}" if attempt else "")


def parse_folder_name(name: str) -> tuple[int, int] | None:
    """Return step and attempt of a checkpoint's folder, None for any other name."""
    match = _FOLDER.fullmatch(name)
    return (int(match.group(1)), int(match.group(2) or 0)) if match else None


def shard_name(rank: int, num_ranks: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"shard-{rank:05d}-of-{num_ranks:05d}.safetensors"


def part_name(rank: int) -> str:
    """Return the name of the small file in which a rank tells rank 0 that its shard is written."""
    return f"part-{rank:05d}.json"


def is_own_file(name: str) -> bool:
    """Return whether only this format writes files of this name."""
    return _OWN_FILE.fullmatch(name) is not None


def write_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON with one line for each file and tensor, sealed by the SHA-256 of all lines before."""
    fields = manifest.model_dump(mode="json")
    files, tensors = fields.pop("files"), fields.pop("tensors")
    lines = [f"{_text(key)}: {_text(value)}" for key, value in fields.items()]
    lines += ['"files": [\n' + ",\n".join(map(_text, files)) + "\n]"]
    lines += [
        '"tensors": {\n' + ",\n".join(f"{_text(name)}: {_text(entry)}" for name, entry in tensors.items()) + "\n}"
    ]
    body = ("{\n" + ",\n".join(lines) + ",\n").encode()
    if len(body) + _SEAL_BYTES > MAX_MANIFEST_BYTES:
        raise BadInput(f"a manifest of {len(body)} bytes could not be read again: the limit is {MAX_MANIFEST_BYTES}.")
    return body + f'"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def read_manifest(data: bytes) -> Manifest:
    """Return the manifest in ``data``.

    Raises BadInput, in one sentence, for anything that write_manifest did not write: damage at any place, another
    format version, or contents that contradict themselves, however hostile.
    """
    body, seal = data[:-_SEAL_BYTES], _SEAL.fullmatch(data[-_SEAL_BYTES:])
    if seal is None or hashlib.sha256(body).hexdigest().encode() != seal.group(1):
        raise BadInput("the manifest is damaged or was not written by triax: its checksum does not match.")
    plain = body.rstrip(b",\n") + b"}"
    try:
        head = _Head.model_validate_json(plain)
        if (head.format, head.format_version) != (FORMAT, FORMAT_VERSION):
            raise BadInput(
                f"the manifest says format {head.format!r:.40} version {head.format_version}; this triax reads "
                f"{FORMAT!r} version {FORMAT_VERSION}."
            )
        return Manifest.model_validate_json(plain)
    except ValidationError as error:
        raise BadInput(f"the manifest contradicts itself or is incomplete: {_first(error)}.") from None


class _Head(BaseModel):
    """What every version of the format says, so that an unknown one can be told from nonsense."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    format: str
    format_version: int


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    said = ".".join(str(part) for part in first["loc"])
    place = "".join(letter if letter.isprintable() else "?" for letter in said)  # a hostile key may hold line breaks
    return f"{place[:200]}: {first['msg'][:300]}" if place else first["msg"][:300]


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ": "), allow_nan=False)
