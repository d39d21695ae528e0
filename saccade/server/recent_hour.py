"""The last hour of requests: counts and latencies of each minute, in memory of a fixed size."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from saccade.types.bill import Bill

_MINUTES = 60
_STEP = 1.1  # from one bound to the next: a percentile is within a tenth
_BOUNDS = tuple(1e-4 * _STEP**i for i in range(165))  # seconds: 0.1 ms to ten minutes


def _zeros() -> list[int]:
    return [0] * (len(_BOUNDS) + 1)


@dataclass(slots=True)
class _Minute:
    number: int  # minutes of the clock
    requests: int = 0
    text_tokens: int = 0
    image_tokens: int = 0  # of videos too
    images: int = 0
    videos: int = 0
    output_tokens: int = 0
    first: list[int] = field(default_factory=_zeros)  # times to the first token, by bound
    between: list[int] = field(default_factory=_zeros)  # times between two tokens


class RecentHour:
    """Only the event loop may call it. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._minutes: deque[_Minute] = deque(maxlen=_MINUTES)

    def first_token(self, seconds: float) -> None:
        self._minute().first[bisect_left(_BOUNDS, seconds)] += 1

    def next_tokens(self, seconds: float, count: int) -> None:
        """So many tokens, each this long after the one before."""
        self._minute().between[bisect_left(_BOUNDS, seconds)] += count

    def finished(self, bills: Iterable[Bill], output_tokens: int) -> None:
        minute = self._minute()
        minute.requests += 1
        minute.output_tokens += output_tokens
        for bill in bills:
            minute.text_tokens += bill.text_tokens
            minute.image_tokens += bill.image_tokens + bill.video_tokens
            images = sum(item.kind == "image" for item in bill.items)
            minute.images += images
            minute.videos += len(bill.items) - images

    def summary(self) -> dict[str, Any]:
        """Requests count in the minute in which they end; times and averages are null without any."""
        oldest = int(self._clock() // 60) - _MINUTES
        minutes = [minute for minute in self._minutes if minute.number > oldest]
        requests = sum(minute.requests for minute in minutes)
        names = ("text_tokens", "image_tokens", "images", "videos", "output_tokens")
        means = {name: sum(getattr(minute, name) for minute in minutes) / max(requests, 1) for name in names}
        return {
            "seconds": min(60.0 * _MINUTES, self._clock() - self._start),
            "requests": requests,
            "max_requests_per_s": max((minute.requests for minute in minutes), default=0) / 60,
            "per_request": {name: round(mean, 2) for name, mean in means.items()} if requests else None,
            "ttft_ms": _percentiles([minute.first for minute in minutes]),
            "itl_ms": _percentiles([minute.between for minute in minutes]),
        }

    def _minute(self) -> _Minute:
        number = int(self._clock() // 60)
        if not self._minutes or self._minutes[-1].number != number:
            self._minutes.append(_Minute(number))
        return self._minutes[-1]


def _percentiles(histograms: Sequence[Sequence[int]]) -> dict[str, float] | None:
    counts = [sum(column) for column in zip(*histograms, strict=True)]
    if not any(counts):
        return None
    return {name: round(_quantile(counts, share) * 1e3, 3) for name, share in (("p50", 0.5), ("p99", 0.99))}


def _quantile(counts: Sequence[int], share: float) -> float:
    """Seconds. Between two bounds values count as evenly spread; above the last bound it is that one."""
    rank = share * sum(counts)
    for index, count in enumerate(counts[: len(_BOUNDS)]):
        if count >= max(rank, 1):
            low = _BOUNDS[index - 1] if index else 0.0
            return low + (_BOUNDS[index] - low) * rank / count
        rank -= count
    return _BOUNDS[-1]
