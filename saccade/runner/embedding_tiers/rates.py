"""What a tier costs beside encoding, measured at start. A tier is used for sizes at which it is cheaper."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

_REPEATS = 3


class EmbeddingTime(NamedTuple):
    """Seconds by embeddings, as a line through two measurements."""

    fixed: float
    per_slot: float

    def seconds(self, slots: int) -> float:
        return self.fixed + self.per_slot * slots

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> EmbeddingTime:
        """(slots, seconds): one or two points. Neither part is below 0: noise must not promise a gain."""
        small, low = points[0]
        large, high = points[-1]
        if small == large:
            return cls(0.0, high / large)
        per_slot = max(0.0, (high - low) / (large - small))
        return cls(max(0.0, low - per_slot * small), per_slot)


NEVER = EmbeddingTime(float("inf"), 0.0)


def best_of(run: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Seconds, the best of a few: other users of the machine only add time."""
    laps = []
    for _ in range(_REPEATS):
        before()
        start = time.perf_counter()
        run()
        laps.append(time.perf_counter() - start)
    return min(laps)


def verdict(what: str, tier: EmbeddingTime, encode: EmbeddingTime, slots: int) -> str:
    """A line for the log."""
    restore_ms = tier.seconds(slots) * 1e3
    encode_ms = encode.seconds(slots) * 1e3
    times = f"{slots} embeddings come back in {restore_ms:.2f} ms and are encoded in {encode_ms:.2f} ms"
    if tier.seconds(slots) >= encode_ms / 1e3:
        return f"{what}: not used for large images, {times}"
    small = next((n for n in (1, 16, 64, 256) if n < slots and tier.seconds(n) < encode.seconds(n)), slots)
    return f"{what}: used from {small} embeddings an image, {times}"
