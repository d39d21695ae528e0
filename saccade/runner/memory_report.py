"""Measures what each part of the memory plan took on a CUDA device. On a CPU nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from saccade.runner.device_memory import MemoryPlan

_DEFAULT_POOL = (0, 0)


class MemoryReport:
    def __init__(self, plan: MemoryPlan) -> None:
        self._plan = plan
        self._is_on = plan.device.type == "cuda"
        self._measured: dict[str, int] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts what is allocated inside and stays, with the private pools of CUDA graphs."""
        before = self._held()
        yield
        self._measured[name] = self._held() - before

    def reserve_work(self) -> None:
        """Allocate the memory of activations as one segment and free it, so that the allocator keeps it.

        Later tensors are cut from it: many sizes do not fragment it, and too little memory fails at start.
        """
        if self._is_on:
            torch.empty(self._plan.parts.work, dtype=torch.uint8, device=self._plan.device)

    def report(self) -> Mapping[str, Mapping[str, int]]:
        if not self._is_on:
            return {}
        plan = self._plan.parts
        return {name: {"planned": getattr(plan, name), "measured": n} for name, n in self._measured.items()}

    def _held(self) -> int:
        if not self._is_on:
            return 0
        segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        graphs = [segment for segment in segments if segment["segment_pool_id"] != _DEFAULT_POOL]
        unused: int = sum(segment["total_size"] - segment["allocated_size"] for segment in graphs)
        return int(torch.cuda.memory_allocated(self._plan.device)) + unused
