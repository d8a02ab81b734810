"""How much memory and time does this rank's device spend, and what is the most it could compute?"""

import logging
import os
import re
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from triax.watch.metrics import PeakFlops

_log = logging.getLogger(__name__)

_NVML_PERIOD_S: Final = 1.0
"""NVML averages over up to a second, so asking more often returns the same number for the price of a driver call."""


_LARGEST_SIZE: Final = 8192
"""Large enough to fill any GPU (*assumed*); three such matrices in bf16 take 384 MiB."""


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """What one device did since the reading before. On CPU both peaks are of the whole process, since its start."""

    peak_active_bytes: int
    peak_reserved_bytes: int
    utilization: float | None
    """0 to 1; None where the device does not say."""


class DeviceMeter:
    """Reads memory and utilisation of one device, from one reading to the next.

    CUDA: the allocator's peaks of live tensors and of memory taken from the device, reset at each reading, and the
    utilisation NVML gives (the part of time in which any kernel ran). CPU: the process's peak resident memory, which
    nothing can reset, and its CPU time as a part of what its compute threads could have used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._nvml_answers = self._is_cuda
        self._nvml_value: float | None = None
        self._nvml_asked_s = -_NVML_PERIOD_S
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> DeviceReading:
        """Return what happened since the last call (or since this meter was made) and begin anew. Never waits for the
        device."""
        return self._read_cuda() if self._is_cuda else self._read_process()

    def _read_cuda(self) -> DeviceReading:
        stats = torch.cuda.memory_stats(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        active, reserved = stats.get("active_bytes.all.peak", 0), stats.get("reserved_bytes.all.peak", 0)
        return DeviceReading(active, reserved, self._nvml_utilization())

    def _nvml_utilization(self) -> float | None:
        now_s = time.perf_counter()
        if self._nvml_answers and now_s - self._nvml_asked_s >= _NVML_PERIOD_S:
            self._nvml_asked_s = now_s
            try:
                self._nvml_value = torch.cuda.utilization(self._device) / 100
            except Exception as error:  # no nvidia-ml-py, no driver library, a MIG slice: each raises its own type
                self._nvml_answers, self._nvml_value = False, None
                _log.info("device/utilization is left out, NVML does not give it: %s", error)
        return self._nvml_value

    def _read_process(self) -> DeviceReading:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        could_use_s = (wall_s - self._wall_s) * torch.get_num_threads()
        # Threads that load data or write files add to the process's time, so the quotient can pass 1.
        share = min((cpu_s - self._cpu_s) / could_use_s, 1.0) if could_use_s > 0 else None
        self._wall_s, self._cpu_s = wall_s, cpu_s
        peak = peak_resident_bytes()
        return DeviceReading(peak, peak, share)


def peak_resident_bytes() -> int:
    """Return the most memory this process has held since it started."""
    try:
        # Not getrusage, where Linux tells: there a process started by a large one inherits the parent's peak.
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        status = ""
    if match := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE):
        return int(match[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_peak(
    declared_flops_per_s: float | None, device: torch.device, dtype: torch.dtype, *, num_sharing: int = 1,
    source: str = "cluster.peak_flops",
) -> PeakFlops:  # fmt: skip
    """Return the peak that was declared, in the file or key ``source``; where none was, the measured one."""
    if declared_flops_per_s is not None:
        return PeakFlops(declared_flops_per_s, source)
    return measure_peak(device, dtype, num_sharing=num_sharing)


def measure_peak(device: torch.device, dtype: torch.dtype, *, num_sharing: int = 1, budget_s: float = 0.3) -> PeakFlops:
    """Return the best FLOP/s that square matmuls in ``dtype`` reach on ``device``, 2 n^3 operations each.

    Sizes double from 128 while one more call fits the time left, then the largest repeats until ``budget_s`` is spent;
    the best call counts. Starting the device's libraries comes on top, once. What a matmul reaches is below the number
    on the data sheet, so MFU against it is higher than against that number.

    ``num_sharing`` ranks of this server compute at once, each with as many threads as this one. Where that is more
    than there are cores, each gets its part of them: what a call reaches while the others happen to sleep is no peak
    of a rank.
    """
    best_flops_per_s, best_size = 0.0, 0
    size = 128
    a, b = _square(size, device, dtype)
    _timed_matmul(a, b)  # starts the library
    deadline_s = time.perf_counter() + budget_s
    while True:
        took_s = _timed_matmul(a, b)
        if (reached := 2 * size**3 / took_s) > best_flops_per_s:
            best_flops_per_s, best_size = reached, size
        left_s = deadline_s - time.perf_counter()
        if left_s <= took_s:
            break
        # Twice the size is eight times the work, done twice (the first call of a size is slow), beside making it.
        if size < _LARGEST_SIZE and left_s > 24 * took_s:
            size *= 2
            a, b = _square(size, device, dtype)
            _timed_matmul(a, b)
    share = 1.0
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        del a, b
        torch.cuda.empty_cache()  # or training would seem to have reserved these matrices
    else:
        threads, cores = torch.get_num_threads(), _num_cores()
        share = min(cores / (num_sharing * threads), 1.0)
        name = f"{threads} CPU threads" + (f", of {num_sharing} ranks on {cores} cores" if share < 1 else "")
    precision = str(dtype).removeprefix("torch.")
    return PeakFlops(share * best_flops_per_s, f"a {precision} matmul of size {best_size} measured on {name}")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _square(size: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    # Zeros would let a GPU run at a higher clock than real numbers do; cosines need no random state.
    ramp = torch.arange(size * size, device=device, dtype=torch.float32).view(size, size).cos_()
    return ramp.to(dtype), ramp.T.to(dtype, copy=True)


def _timed_matmul(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the seconds of one ``a @ b``, the device's own work included."""
    is_cuda = a.is_cuda
    if is_cuda:
        torch.cuda.synchronize(a.device)
    start_s = time.perf_counter()
    with torch.no_grad():
        torch.mm(a, b)
    if is_cuda:
        torch.cuda.synchronize(a.device)
    return max(time.perf_counter() - start_s, 1e-9)
