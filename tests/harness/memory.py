"""Which bytes are held: by the tensors that Python can see, and by everything that ran while a test was watching?"""

import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Scan:
    """A scan of Python's memory for tensors that were not there when this was made. For ranks: it freezes the heap."""

    def __init__(self) -> None:
        gc.freeze()  # the collector forgets what there is, so that a scan takes milliseconds

    def held_bytes(self, until: int, patience_s: float) -> int:
        """Return the bytes of floating-point storages that Python reaches by newer tensors, each counted once.

        Single numbers (step counters, sums of losses) and integers (tables of ranks in meshes) are left out. Scans
        again for up to ``patience_s`` while there is more than ``until``: gloo's threads let go of what they sent a
        moment after the collective is over.
        """
        deadline_s = time.monotonic() + patience_s
        while (held := _scan()) > until and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return held


def _scan() -> int:
    gc.collect()
    held = {}
    for tensor in _tensors():
        if tensor.is_floating_point() and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            if storage.nbytes() > tensor.element_size():
                held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def _tensors() -> Iterator[Tensor]:
    """Every tensor the garbage collector knows, and their gradients, which it does not where Python never asked."""
    for found in [found for found in gc.get_objects() if isinstance(found, Tensor)]:
        tensor = _local(found)
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield _local(tensor.grad)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Watch(TorchDispatchMode):
    """Sees every storage that an operation makes inside the ``with``, whoever holds it: autograd, a cache or Python."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage._cdata for storage in _of(pytree.tree_leaves((args, kwargs)))}
        result = func(*args, **(kwargs or {}))
        for storage in _of(pytree.tree_leaves(result)):
            if storage._cdata not in before:
                self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def live_bytes(self) -> int:
        """Return the bytes of the storages seen that nobody has let go of."""
        return sum(size for reference, size in self._seen.values() if not reference.expired())


def _of(leaves: list[Any]) -> Iterator[torch.UntypedStorage]:
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.device.type != "meta":
            yield leaf.untyped_storage()
