"""How long the encoder worked, on the clock of its device. Knows neither images nor layers.

On a CUDA device a lap is a pair of events on its stream; they are read only when a time is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from saccade.types.media import Key
from saccade.types.step import MediaTimes


class Watch(Protocol):
    def lap(self) -> AbstractContextManager[None]:
        """Time what runs inside."""

    def ms(self) -> float:
        """The sum of the laps so far. Waits for the device."""


class HostWatch:
    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def lap(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start

    def ms(self) -> float:
        return self._seconds * 1e3


class DeviceWatch:
    def __init__(self) -> None:
        self._laps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def lap(self) -> Iterator[None]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        yield
        end.record()
        self._laps.append((start, end))

    def ms(self) -> float:
        if self._laps:
            self._laps[-1][1].synchronize()  # one stream: the last lap ends last
        return float(sum(start.elapsed_time(end) for start, end in self._laps))


class Times(Mapping[Key, MediaTimes]):
    """Times of images by key. The keys are known at once; reading a time may wait for the device."""

    def __init__(self) -> None:
        self._read: dict[Key, Callable[[], MediaTimes]] = {}

    def add(self, key: Key, decode_ms: float, watch: Watch, share: float) -> None:
        """`share`: this image's part of what the watch measured."""
        self._read[key] = lambda: MediaTimes(decode_ms, watch.ms() * share)

    def put(self, key: Key, times: MediaTimes) -> None:
        """Measured elsewhere."""
        self._read[key] = lambda: times

    def __getitem__(self, key: Key) -> MediaTimes:
        return self._read[key]()

    def __iter__(self) -> Iterator[Key]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)
