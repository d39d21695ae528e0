"""What all kernel benchmarks share: a case, its clock and its row. Knows no kernel.

Every time is that of a CUDA graph over calls in a row that read memory of their own, so that the L2 does not help.
Without a GPU nothing is timed: with TRITON_INTERPRET=1 small cases are compared on the CPU.
"""

from __future__ import annotations

import math
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter multiplies bfloat16 matrices as if their bits were integers.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
BYTES_PER_S = 4.2e12
FLOPS = 800e12  # reachable on an H200, whose peaks are 4.8e12 and 990e12
COLD_BYTES = 200e6  # four times the L2: what is read in a row until something is read again
REPLAYS = 15

Call = Callable[[], Any]
Ways = Mapping[str, Sequence[Call]]  # calls by the name of a way, one for each copy of its inputs
NONE: Ways = MappingProxyType({})


def _same(out: Any) -> Tensor:
    assert isinstance(out, Tensor)
    return out


class Case(NamedTuple):
    """One piece of work, done in several ways."""

    work: str
    ours: Ways  # the first call of each must give what is expected
    floor_us: float  # of one call
    expected: Tensor | None = None  # None: nothing is compared
    beside: Ways = NONE  # of libraries: only timed
    limit: float = 1e-2  # of the error relative to the norm, for bfloat16 operands
    read: Callable[[Any], Tensor] = _same  # what is compared of a result
    in_graph: bool = True  # not where the host copies what a launch reads


class Row(NamedTuple):
    """A line of the table."""

    work: str
    way: str
    us: float | None
    floor_us: float
    error: float | None
    is_right: bool


def rows_of(case: Case) -> Iterator[Row]:
    """A row for each way. One that fails prints the end of its traceback; the others still run."""
    ways = dict(case.ours)
    if DEVICE.type == "cuda":
        ways |= case.beside
    for way, calls in ways.items():
        try:
            yield _row(case, way, calls)
        except Exception:
            lines = [line.strip() for line in traceback.format_exc().splitlines() if line.strip(" ~^")]
            print(f"FAILED {case.work}, {way}: {' | '.join(lines[-3:])[-500:]}", flush=True)
            yield Row(case.work, way, None, case.floor_us, None, False)


def _row(case: Case, way: str, calls: Sequence[Call]) -> Row:
    out = calls[0]()
    error = None
    if case.expected is not None and way in case.ours:
        error = error_of(case.read(out), case.expected)
    clock = graph_us if case.in_graph else device_us
    us = clock(calls) if DEVICE.type == "cuda" else None
    return Row(case.work, way, us, case.floor_us, error, error is None or error <= case.limit)


def line_of(row: Row) -> str:
    line = f"{row.work:44} {row.way:14} "
    if row.us:
        line += f"{row.us:9.2f} us  floor {row.floor_us:8.2f}  x{row.us / row.floor_us:6.2f}"
    if row.error is not None:
        line += f"  error {row.error:.1e}"
    if not row.is_right:
        line += "  WRONG"
    return line


def graph_us(calls: Sequence[Call]) -> float:
    """Median time of one call in a CUDA graph of all of them."""
    for call in calls[:2]:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return _median_us(graph.replay) / len(calls)


def device_us(calls: Sequence[Call]) -> float:
    """Median time of one call by the device's clock, launched one by one."""
    calls[0]()
    return _median_us(calls[0])


def _median_us(call: Call) -> float:
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def error_of(out: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected. NaN becomes infinite, so that it never passes."""
    error = float((out.float() - expected.float()).norm() / expected.float().norm())
    return math.inf if math.isnan(error) else error


def copies(size: float, maximum: int = 64) -> int:
    """How many inputs of `size` bytes pass through the L2 before one comes again; two where nothing is timed."""
    if DEVICE.type == "cpu":
        return 2
    return min(max(4, math.ceil(COLD_BYTES / size)), maximum)


def read_us(size: float) -> float:
    """The least time for so many bytes."""
    return size / BYTES_PER_S * 1e6


def compute_us(flop: float) -> float:
    """The least time for so many operations."""
    return flop / FLOPS * 1e6


def random(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)
