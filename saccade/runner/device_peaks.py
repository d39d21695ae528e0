"""What a device can do at most, measured: bandwidth by a large copy, FLOP/s by a large GEMM."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from saccade.util.torch_utils import capability_of

_WARM_UP = 3
_REPEATS = 10


@dataclass(frozen=True)
class Peaks:
    bytes_per_s: float
    flops: float


def measure_peaks(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Peaks:
    """A copy larger than every cache, and a GEMM that keeps the tensor cores busy."""
    values, side = (1 << 31, 8192) if device.type == "cuda" else (1 << 26, 1024)
    source = torch.empty(values, dtype=dtype, device=device)
    target = torch.empty_like(source)
    copying = _seconds(lambda: target.copy_(source), device)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    multiplying = _seconds(lambda: torch.mm(a, b), device)
    return Peaks(2 * source.nbytes / copying, 2 * side**3 / multiplying)


@dataclass(frozen=True)
class MeasuredDevice:
    name: str
    memory_bytes: int
    peaks: Peaks
    has_fp8: bool


def measure_device(device: torch.device) -> MeasuredDevice:
    """A CPU in float32, a GPU in bfloat16."""
    if device.type == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        name = f"{platform.machine()} CPU of {torch.get_num_threads()} threads"
        return MeasuredDevice(name, memory, measure_peaks(device, torch.float32), has_fp8=False)
    name = torch.cuda.get_device_name(device)
    has_fp8 = capability_of(device) >= (8, 9)
    return MeasuredDevice(name, torch.cuda.mem_get_info(device)[1], measure_peaks(device), has_fp8)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_WARM_UP + _REPEATS):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[_WARM_UP:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
