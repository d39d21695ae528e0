"""The requests that run: they alone hold blocks and pins, and one place takes back what they hold."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from saccade.scheduler.encoder_cache import EncoderCache
from saccade.scheduler.kv_cache import BlockPool
from saccade.scheduler.request import ScheduledRequest


class RunningRequests:
    """At most `max_requests`, in order of arrival."""

    def __init__(self, max_requests: int, kv_cache: BlockPool, encoder_cache: EncoderCache) -> None:
        self.max_requests = max_requests
        self.in_order: list[ScheduledRequest] = []
        self._kv_cache = kv_cache
        self._encoder_cache = encoder_cache
        self._freed: list[str] = []  # requests that the runner has not been told of

    @property
    def seats(self) -> int:
        """Requests that may still start to run."""
        return self.max_requests - len(self.in_order)

    def start(self, seq: ScheduledRequest) -> None:
        seq.is_running = True
        insort(self.in_order, seq, key=lambda other: other.order)

    def release(self, seq: ScheduledRequest, *, is_known: bool = True) -> None:
        """It gives back all it holds, on finish, abort, failure and preemption alike.

        `is_known`: the runner has heard of it, and must hear that it is gone.
        """
        self.in_order.remove(seq)
        seq.release(self._kv_cache, self._encoder_cache)
        if is_known:
            self._freed.append(seq.request_id)

    def drain_freed(self) -> tuple[str, ...]:
        """Requests that were finished, aborted or preempted since the last plan."""
        freed = tuple(self._freed)
        self._freed = []
        return freed

    def tell_again(self, freed: Iterable[str]) -> None:
        """The runner may have broken off before it read a plan, so what the plan told is told again."""
        self._freed = list(dict.fromkeys((*freed, *self._freed)))
