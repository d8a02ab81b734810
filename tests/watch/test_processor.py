"""Is a processor measured quickly, and shared out among the ranks that use it at once?"""

import time
from pathlib import Path

import numpy as np
import pytest

import triax.watch.processor
from triax.watch.processor import measure_processor


@pytest.mark.parametrize("is_double", [False, True])
def test_the_rates_are_those_of_products_and_copies_made_here(is_double: bool) -> None:
    share = measure_processor(1, is_double=is_double)
    a = np.ones((512, 512), dtype=np.float64 if is_double else np.float32)
    b, source, target = a + 1, np.ones(1 << 24), np.empty(1 << 24)
    begun_s = time.perf_counter()
    np.matmul(a, b)
    product = 2 * 512**3 / (time.perf_counter() - begun_s)
    begun_s = time.perf_counter()
    np.copyto(target, source)
    copy = 2 * source.nbytes / (time.perf_counter() - begun_s)
    # The machine may be shared, so that a single call may take many times as long as the best; never far less.
    assert product / 4 < share.matmul_flops_per_s < 1e14
    assert copy / 4 < share.memory_bytes_per_s < 1e13


def test_ranks_share_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triax.watch.processor, "_num_cores", lambda: 8)
    monkeypatch.setattr(triax.watch.processor, "_matmul_flops_per_s", lambda dtype: 1e9)
    monkeypatch.setattr(triax.watch.processor, "_copy_bytes_per_s", lambda threads: 1e9 * threads)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    shares = [measure_processor(ranks) for ranks in (1, 4, 8)]
    # Two threads reach 1e9: four ranks have two cores each, eight ranks one.
    assert [share.matmul_flops_per_s for share in shares] == [1e9, 1e9, 5e8]
    assert [share.memory_bytes_per_s for share in shares] == [2e9, 2e9, 1e9]
    assert shares[0].memory_bytes // 8 == shares[2].memory_bytes
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert [measure_processor(ranks).matmul_flops_per_s for ranks in (1, 4)] == [1e9, 2.5e8]


def test_a_container_has_no_more_memory_than_its_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(triax.watch.processor, "_CGROUPS", (limit, tmp_path / "none"))
    monkeypatch.setattr(triax.watch.processor, "_BUDGET_S", 0.0)
    limit.write_text("max\n")
    whole = measure_processor(1).memory_bytes
    limit.write_text("1073741824\n")
    assert measure_processor(2).memory_bytes == 2**29
    assert whole > 2**29
