"""When a set of replicas grows and shrinks: by queued work and KV use, with hysteresis. No clock, no I/O.

`Autoscaler.decide` is called at even intervals. It grows after a few observations of high load in a row, and
shrinks after many under which one replica fewer would still have low load: a short burst starts no engine,
and a short pause ends none.
"""

from __future__ import annotations

from typing import NamedTuple

HIGH_WORK = 16_384  # prompt tokens queued for each replica
LOW_WORK = 2_048
HIGH_KV_USE = 0.9  # of the blocks, held by requests
LOW_KV_USE = 0.5
GROW_AFTER = 3  # observations in a row
SHRINK_AFTER = 30


class Load(NamedTuple):
    """What all replicas have to do at one moment."""

    num_ready: int
    num_starting: int  # they will take a part of it soon
    queued_work: int  # prompt tokens over all of them
    kv_use: float  # the sum over the ready ones of the share of blocks in use


class Autoscaler:
    def __init__(self, min_replicas: int, max_replicas: int) -> None:
        self._min = min_replicas
        self._max = max_replicas
        self._num_high = 0  # observations in a row
        self._num_low = 0

    @property
    def is_needed(self) -> bool:
        return self._min < self._max

    def decide(self, load: Load) -> int:
        """Replicas to add: 1, 0 or -1."""
        is_high = bool(load.num_ready) and _is_high(load)
        is_low = load.num_ready > 1 and _is_low(load, load.num_ready - 1)
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


def _is_high(load: Load) -> bool:
    return load.queued_work > HIGH_WORK * load.num_ready or load.kv_use > HIGH_KV_USE * load.num_ready


def _is_low(load: Load, num_replicas: int) -> bool:
    """Whether so few would have little to do."""
    return load.queued_work < LOW_WORK * num_replicas and load.kv_use < LOW_KV_USE * num_replicas
