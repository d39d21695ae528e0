"""How a step's windows are computed. `TorchForward` is the reference, `CudaForward` the fast path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from saccade.models.interface import VisionLanguageModel
from saccade.runner.batch import RequestState
from saccade.types.latency import LatencyProfile
from saccade.types.media import Grid, Key
from saccade.types.step import Admission, Sample, ScheduledWindow

Windows = Sequence[tuple[ScheduledWindow, RequestState]]
Embeddings = Mapping[Key, Tensor]
Sampled = Callable[[], dict[str, Sample]]
"""Waits for the device; returns the samples by request id."""


class Forward(Protocol):
    @property
    def is_async(self) -> bool:
        """Whether passes are launched without waiting for them."""

    def open(self, admission: Admission) -> None:
        """Add a request, or replace its block table."""

    def extend(self, request_id: str, count: int, blocks: Sequence[int]) -> None:
        """Append blocks to the `count` ones it has."""

    def close(self, request_id: str) -> None: ...

    def clear(self) -> None:
        """Forget every request."""

    def step(self, decode: Windows, encode: Callable[[], Windows], embeddings: Embeddings) -> Sampled:
        """Compute the latest token of each request in `decode`, and the prefill windows of `encode`.

        `encode` advances the encoder; the embeddings of its windows are resident when it returns. It is
        called once, and decode may run meanwhile.
        """

    def mixed(self, prefill: Windows, embeddings: Embeddings, decode: Windows) -> Sampled:
        """Both as one mixed batch where possible. No window of `prefill` samples."""

    def measure(
        self, model: VisionLanguageModel, largest: Grid | None, ceiling_ms: float | None
    ) -> LatencyProfile | None:
        """Time the parts of a step, before any request is open. None: not timed. `largest`: of all images."""
