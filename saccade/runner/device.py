"""What the runner needs of a device that computes steps by itself while the host goes on. CUDA implements it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from saccade.models.interface import VisionLanguageModel
from saccade.runner.batch import RequestState
from saccade.types import Grid, Key, LatencyProfile, Sample, ScheduledWindow

Windows = Sequence[tuple[ScheduledWindow, RequestState]]
Sampled = Callable[[], dict[str, Sample]]
"""Waits for the device, then tells the tokens by request id."""


class DeviceForward(Protocol):
    def measure(self, model: VisionLanguageModel, largest: Grid | None, target_ms: float | None) -> LatencyProfile:
        """How long the parts of a step take; before any request is open. `largest`: the most expensive picture."""

    def open(self, request_id: str, blocks: Sequence[int]) -> None:
        """A request comes, or comes again with another table of blocks."""

    def extend(self, request_id: str, held: int, blocks: Sequence[int]) -> None:
        """Blocks behind the `held` ones it has."""

    def close(self, request_id: str) -> None: ...

    def clear(self) -> None:
        """Forget every request."""

    def decode(self, windows: Windows) -> Sampled:
        """Start to compute the latest token of each request."""

    def mixed(self, prompts: Windows, embeddings: Mapping[Key, Tensor], decoding: Windows) -> Sampled:
        """Both, in one pass where one was recorded for as many. No window of `prompts` samples."""

    def prompts(self, windows: Windows, embeddings: Mapping[Key, Tensor]) -> Sampled:
        """Start to compute windows of any length; the embeddings of their pictures are at hand."""
