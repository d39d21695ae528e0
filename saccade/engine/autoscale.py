"""When a set of workers grows and shrinks: by queued work and use, with hysteresis. No clock, no I/O.

`Autoscaler.decide` is called at even intervals. It grows after a few observations of high load in a row, and
shrinks after many under which one worker fewer would still have low load: a short burst starts none, and a
short pause ends none.
"""

from __future__ import annotations

from typing import NamedTuple

HIGH_WORK = 16_384  # queued for each worker: prompt tokens of an engine, patches of an encoder worker
LOW_WORK = 2_048
HIGH_USE = 0.9  # of an engine's KV blocks, held by requests; of an encoder worker's time
LOW_USE = 0.5
AUTOSCALE_SECONDS = 2.0  # between two observations
GROW_AFTER = 3  # observations in a row
SHRINK_AFTER = 30


class WorkerLoad(NamedTuple):
    """What all workers of a kind have to do at one moment."""

    num_ready: int
    num_starting: int  # they will take a part of it soon
    queued_work: int  # over all of them
    use: float  # the sum over the ready ones of what is in use


class Autoscaler:
    def __init__(self, minimum: int, maximum: int) -> None:
        self._min = minimum
        self._max = maximum
        self._num_high = 0  # observations in a row
        self._num_low = 0

    @property
    def is_needed(self) -> bool:
        return self._min < self._max

    def decide(self, load: WorkerLoad) -> int:
        """Workers to add: 1, 0 or -1."""
        is_high = bool(load.num_ready) and _excess(load, load.num_ready, HIGH_WORK, HIGH_USE) > 0
        is_low = _excess(load, load.num_ready - 1, LOW_WORK, LOW_USE) < 0
        self._num_high = self._num_high + 1 if is_high else 0
        self._num_low = self._num_low + 1 if is_low else 0
        count = load.num_ready + load.num_starting
        if self._num_high >= GROW_AFTER and not load.num_starting and count < self._max:
            self._num_high = 0
            return 1
        if self._num_low >= SHRINK_AFTER and not load.num_starting and count > self._min:
            self._num_low = 0
            return -1
        return 0


def _excess(load: WorkerLoad, num_workers: int, work: float, use: float) -> float:
    """Above 0: so many workers would have more work or use each than this. Below: less of both."""
    return max(load.queued_work - work * num_workers, load.use - use * num_workers)
