"""Timing on a GPU for the scripts that try kernels: work in a CUDA graph, and trials that may fail."""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
_WARM_UP = 2  # replays that do not count


def graph_us(work: Callable[[], object], replays: int = 12) -> float:
    """Median time of one replay of `work`, in microseconds."""
    graph, _ = capture(work)
    times: list[float] = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[_WARM_UP:])


def capture(work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of `work`, and what it returns, which replays write to. Kernels are compiled first."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work()
    return graph, made


def attempt(name: str, work: Callable[[], T]) -> T | None:
    """What `work` returns; None after its traceback's end is printed, so that the rest goes on."""
    try:
        return work()
    except Exception:
        lines = [line.strip() for line in traceback.format_exc().splitlines() if line.strip(" ~^")]
        print(f"FAILED {name}: {' | '.join(lines[-3:])[-500:]}", flush=True)
        return None
