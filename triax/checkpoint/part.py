"""How does one rank copy what it has to write out of training's way, and write it as one safetensors file?"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from triax.checkpoint.disk import write_new
from triax.checkpoint.format import DTYPES, FileEntry, block_key
from triax.checkpoint.state import Box, Slice
from triax.checkpoint.tensor_file import lay_out


@dataclass(frozen=True)
class Block:
    """One block of one tensor that this rank writes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box


class Part:
    """The file one rank writes at every save: its blocks in a fixed order, and one piece of host memory for them.

    The memory is laid out as the file's data, so that a snapshot is one copy for each block and the file is one stream.
    It is kept between saves: the state's share of this rank, once, in host memory.
    """

    def __init__(self, file_name: str, blocks: Sequence[Block]) -> None:
        self.file_name = file_name
        by_key = {block_key(block.name, block.box, block.shape): block for block in blocks}
        layout = lay_out(
            (key, block.dtype, [stop - start for start, stop in block.box]) for key, block in by_key.items()
        )
        self._places = [(by_key[key], begin, end) for key, begin, end in layout.places]
        self._header = layout.header
        self._data_bytes = layout.num_bytes - len(layout.header)
        self._host: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the file; 0 if this rank has nothing to write, and then there is no file."""
        return len(self._header) + self._data_bytes if self._places else 0

    def copy(self, slices: Mapping[str, Sequence[Slice]], *, is_pinned: bool) -> None:
        """Copy this rank's blocks to host memory, pinned if a card does it: then the copies are only enqueued."""
        if self._host is None:
            self._host = torch.empty(self._data_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        for block, begin, end in self._places:
            source = _view(slices[block.name], block.box)
            target = self._host[begin:end].view(DTYPES[block.dtype]).view(source.shape)
            target.copy_(source, non_blocking=source.is_cuda)

    def write(self, folder: Path, is_cancelled: Callable[[], bool]) -> FileEntry | None:
        """Write the snapshot; return size and checksum of the file once it is on the disk, None if there is none.

        Raises OSError, or Cancelled.
        """
        if not self._places:
            return None
        num_bytes, sha256 = write_new(folder / self.file_name, self.stream(), is_cancelled)
        return FileEntry(name=self.file_name, bytes=num_bytes, sha256=sha256)

    def stream(self) -> Iterator[memoryview]:
        """Yield the bytes of the file, as the newest snapshot has them."""
        assert self._host is not None
        yield memoryview(self._header)
        yield self._host.numpy().data


def _view(slices: Sequence[Slice], box: Box) -> torch.Tensor:
    """Return the part of a rank's own memory that holds ``box``, which lies inside one of its slices."""
    for piece in slices:
        if all(low <= start and stop <= high for (low, high), (start, stop) in zip(piece.box, box, strict=True)):
            view = piece.local
            for dim, ((start, stop), (low, _)) in enumerate(zip(box, piece.box, strict=True)):
                view = view.narrow(dim, start - low, stop - start)
            return view
    raise AssertionError(f"no slice of this rank holds {box}")
