"""Are memory, utilisation and peak of the device what independent counts say?"""

import os
import subprocess
import sys
import time

import pytest
import torch

from triax.watch.device import DeviceMeter, device_peak, measure_peak, peak_resident_bytes

CPU = torch.device("cpu")


def spin(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_peak_memory_grows_by_what_was_touched_and_stays() -> None:
    before = peak_resident_bytes()
    block = torch.ones(64 * 2**20 // 4)
    grown = peak_resident_bytes() - before
    del block
    # At most the block and a little: what was free in the process before may serve a part of it.
    assert 0 <= grown < 80 * 2**20
    # The kernel sums up each thread's pages now and then, so its peak is off by some of them.
    assert peak_resident_bytes() >= before + grown - 2**20
    assert abs(DeviceMeter(CPU).read().peak_active_bytes - peak_resident_bytes()) < 2**20


def test_peak_memory_is_this_process_not_the_one_that_started_it() -> None:
    """A child of a process that holds 300 MiB is small; ``ru_maxrss`` may say otherwise after fork and exec."""
    code = "import triax.watch.device as d; print(d.peak_resident_bytes())"
    block = torch.ones(300 * 2**20 // 4)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, close_fds=False)
    held = peak_resident_bytes()
    del block
    assert 20 * 2**20 < int(done.stdout) < held


def test_utilisation_is_cpu_time_over_time() -> None:
    meter = DeviceMeter(CPU)
    time.sleep(0.2)
    idle = meter.read().utilization
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    spin(0.2)
    busy = meter.read().utilization
    # The machine may be shared, so busy is held against the same quotient taken here, not against one.
    expected = (time.process_time() - start_cpu_s) / (time.perf_counter() - start_s) / torch.get_num_threads()
    assert idle is not None
    assert idle < 0.3
    assert busy == pytest.approx(min(expected, 1.0), abs=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_measured_peak_is_not_beaten_by_a_matmul(dtype: torch.dtype) -> None:
    start_s = time.perf_counter()
    peak = measure_peak(CPU, dtype, budget_s=0.15)
    took_s = time.perf_counter() - start_s
    assert took_s < 2.0, "0.15 s and a slow first call, on a machine that may be busy"
    assert str(dtype).removeprefix("torch.") in peak.source
    size = 256
    a = torch.randn(size, size).to(dtype)
    rates = []
    for _ in range(5):
        start_s = time.perf_counter()
        a @ a
        rates.append(2 * size**3 / (time.perf_counter() - start_s))
    assert peak.flops_per_s > 0.5 * sorted(rates)[2]


def test_ranks_share_the_cores_and_so_their_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 64 ranks on fewer cores has its part of them, however few are computing while it measures."""
    monkeypatch.setattr("triax.watch.device._timed_matmul", lambda a, b: 0.01)
    alone, shared = (measure_peak(CPU, torch.float32, num_sharing=ranks, budget_s=0.02) for ranks in (1, 64))
    cores = len(os.sched_getaffinity(0))
    share = min(cores / (64 * torch.get_num_threads()), 1.0)
    assert shared.flops_per_s == pytest.approx(share * alone.flops_per_s)
    assert f"of 64 ranks on {cores} cores" in shared.source


def test_a_declared_peak_wins_and_says_where_it_is_from() -> None:
    peak = device_peak(989e12, CPU, torch.bfloat16)
    assert (peak.flops_per_s, peak.source) == (989e12, "cluster.peak_flops")
    assert "measured" in device_peak(None, CPU, torch.float32).source


@pytest.mark.gpu
def test_cuda_peaks_are_of_the_time_since_the_last_reading() -> None:
    device = torch.device("cuda", 0)
    meter = DeviceMeter(device)
    block = torch.ones(64 * 2**20, device=device)  # 256 MiB
    del block
    first, second = meter.read(), meter.read()
    assert first.peak_active_bytes - second.peak_active_bytes >= 256 * 2**20
    assert second.peak_reserved_bytes >= 256 * 2**20, "the allocator keeps what was freed"
    assert first.utilization is None or 0 <= first.utilization <= 1


@pytest.mark.gpu
def test_cuda_peak_is_measured_in_half_a_second() -> None:
    device = torch.device("cuda", 0)
    measure_peak(device, torch.bfloat16)
    start_s = time.perf_counter()
    peak = measure_peak(device, torch.bfloat16)
    assert time.perf_counter() - start_s < 0.5
    assert 1e13 < peak.flops_per_s < 5e15
