"""How fast does this server's processor multiply and copy, and how much memory has it? Told in half a second.

Without torch, so that a run can be planned before any rank starts. What is told is one rank's share while all ranks of
the server compute at once, which is how they train. ``triax.watch.device`` measures what utilisation is a part of, in
the type that a run computes in; this here only has to be near enough to choose between layouts.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_BUDGET_S: Final = 0.15
"""For each of the two measurements."""
_SMALLEST: Final = 128
_LARGEST: Final = 4096
_COPIED_BYTES: Final = 1 << 25
"""Of one thread: with several threads more than a processor's caches hold (*assumed*)."""
_MOST_THREADS: Final = 64
"""Enough to fill the memory's bandwidth of any server (*assumed*)."""
_CGROUPS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class ProcessorShare:
    """What one rank of a server has of its processor."""

    matmul_flops_per_s: float
    """What large matrix products reach, 2 n^3 operations each."""
    memory_bytes_per_s: float
    """Bytes read and written by large copies."""
    memory_bytes: int


def measure_processor(num_ranks: int, *, is_double: bool = False) -> ProcessorShare:
    """Return the share of each of ``num_ranks`` ranks of this server; ``is_double``: products are of fp64, not fp32.

    Takes less than half a second, and all cores.
    """
    cores = _num_cores()
    threads = min(_num_threads(cores), cores)
    # As many threads as all ranks together keep busy, and a rank's part of what those reach.
    busy = min(num_ranks * threads, cores)
    products = _matmul_flops_per_s(np.dtype(np.float64 if is_double else np.float32))
    return ProcessorShare(
        matmul_flops_per_s=products * busy / (num_ranks * threads),
        memory_bytes_per_s=_copy_bytes_per_s(min(busy, _MOST_THREADS)) / num_ranks,
        memory_bytes=_memory_bytes() // num_ranks,
    )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _num_threads(cores: int) -> int:
    """Threads of one product: as NumPy's library reads it from the environment, else all cores."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isascii() and said.isdecimal() and 0 < int(said) <= cores else cores


def _matmul_flops_per_s(dtype: np.dtype[Any]) -> float:
    """Return the best that square products reach; sizes double while one more call fits the time left."""
    best, size = 0.0, _SMALLEST
    end_s = time.perf_counter() + _BUDGET_S
    a, b = _squares(size, dtype)
    _timed_product(a, b)  # starts the library's threads
    while True:
        took_s = _timed_product(a, b)
        best = max(best, 2 * size**3 / took_s)
        left_s = end_s - time.perf_counter()
        if left_s <= took_s:
            return best
        if size < _LARGEST and left_s > 12 * took_s:
            size *= 2
            a, b = _squares(size, dtype)


def _squares(size: int, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    # Two of them: a product with its own transpose is half the work, and NumPy knows it.
    a = np.linspace(-1, 1, size * size, dtype=dtype).reshape(size, size)
    return a, a + 1


def _timed_product(a: NDArray[Any], b: NDArray[Any]) -> float:
    start_s = time.perf_counter()
    np.matmul(a, b)
    return max(time.perf_counter() - start_s, 1e-9)


def _copy_bytes_per_s(threads: int) -> float:
    """Return bytes read and written a second by ``threads`` that copy at once; the best of several rounds counts."""
    pairs = [(np.ones(_COPIED_BYTES, dtype=np.uint8), np.empty(_COPIED_BYTES, dtype=np.uint8)) for _ in range(threads)]
    best, end_s = 0.0, time.perf_counter() + _BUDGET_S
    with ThreadPoolExecutor(threads) as pool:
        is_warm = False
        while not best or time.perf_counter() < end_s:
            start_s = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pairs))
            took_s = max(time.perf_counter() - start_s, 1e-9)
            if is_warm:  # the first round maps the pages
                best = max(best, 2.0 * threads * _COPIED_BYTES / took_s)
            is_warm = True
    return best


def _memory_bytes() -> int:
    """Return the memory of this server, or of the container that this process is in."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _CGROUPS:
        try:
            said = file.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if said.isdecimal():
            found = min(found, int(said))
    return found
