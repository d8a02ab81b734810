"""How do ranks tell each other small plain values, without pickle?

Values travel as compressed JSON in tensors of bytes. ``all_gather_object`` and its sisters would unpickle what a peer
sends.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group, or this process alone. All of them call every method but ``of`` together."""

    group: dist.ProcessGroup | None
    rank: int
    """This rank's number inside the group."""
    size: int

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> "Ranks":
        """Return the ranks of ``group``; of the default group for None; this process alone where there is none."""
        if not dist.is_initialized():
            return Ranks(None, 0, 1)
        rank = dist.get_rank(group)
        assert rank >= 0, "this process is no member of the group"
        return Ranks(group, rank, dist.get_world_size(group))

    def maxima(self, *values: int) -> tuple[int, ...]:
        """Return the largest of what the ranks said, value by value."""
        if self.size == 1:
            return tuple(int(value) for value in values)
        numbers = torch.tensor([int(value) for value in values], dtype=torch.int64, device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        return tuple(numbers.tolist())

    def gather(self, value: Any) -> list[Any] | None:
        """Return on rank 0 what every rank said, by rank; None on the others."""
        if self.size == 1:
            return [value]
        mine = _encode(value)
        (length,) = self.maxima(len(mine))
        sent = self._padded(mine, length)
        received = [torch.empty_like(sent) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(sent, received, group=self.group, group_dst=0)
        return None if received is None else [_decode(text) for text in received]

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """Return what rank 0 says to this rank: ``values[rank]`` of rank 0; the others give None."""
        if self.size == 1:
            assert values is not None
            return values[0]
        texts = [] if values is None else [_encode(value) for value in values]
        (length,) = self.maxima(max(map(len, texts), default=0))
        received = self._padded(b"", length)
        sent = [self._padded(text, length) for text in texts] if self.rank == 0 else None
        dist.scatter(received, sent, group=self.group, group_src=0)
        return _decode(received)

    def broadcast(self, value: Any) -> Any:
        """Return what rank 0 says to all; what the others give does not count."""
        if self.size == 1:
            return value
        text = _encode(value) if self.rank == 0 else b""
        (length,) = self.maxima(len(text))
        sent = self._padded(text, length)
        dist.broadcast(sent, group=self.group, group_src=0)
        return _decode(sent)

    def union(self, texts: Sequence[str]) -> list[str]:
        """Return the texts of all ranks without repetition, in rank order; where there is none, costs one number."""
        (most,) = self.maxima(len(texts))
        if most == 0:
            return []
        said = self.gather(list(texts))
        merged = None if said is None else list(dict.fromkeys(text for of_rank in said for text in of_rank))
        return list(self.broadcast(merged))

    @property
    def _device(self) -> torch.device:
        # Only a group made for NCCL alone cannot carry CPU tensors.
        return torch.device("cuda" if dist.get_backend(self.group) == "nccl" else "cpu")

    def _padded(self, text: bytes, length: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(text.ljust(length, b"\0")), dtype=torch.uint8).to(self._device)


def _encode(value: Any) -> bytes:
    text = zlib.compress(json.dumps(value, separators=(",", ":")).encode(), level=1)
    return len(text).to_bytes(8, "little") + text


def _decode(tensor: torch.Tensor) -> Any:
    data = tensor.cpu().numpy().tobytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(zlib.decompress(data[8 : 8 + length]))
