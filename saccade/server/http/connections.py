"""Limits the open connections, in total and per client address, and evicts idle ones when there are too many.

Knows nothing of what is sent over a connection.
"""

from __future__ import annotations

import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from saccade.errors import ConfigError

logger = logging.getLogger("saccade.server")

_OTHER_DESCRIPTORS = 256  # the engine, fetches, files, reserve connections
_MIN_OTHER_DESCRIPTORS = 128
_MAX_AUTOMATIC = 4096  # an idle connection costs memory too
_NUM_RESERVE = 64  # connections beyond the limit for probes only
_MIN_IDLE_SECONDS = 1.0  # a newer connection may be about to send its request
_LOG_SECONDS = 10.0


def connection_limit(maximum: int | None) -> int:
    """The maximum number of open connections. ConfigError if the process cannot open that many."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if maximum is None:
        return min(max(descriptors - _OTHER_DESCRIPTORS, descriptors // 2), _MAX_AUTOMATIC)
    if maximum > max(descriptors - _MIN_OTHER_DESCRIPTORS, descriptors // 2):
        raise ConfigError(
            f"max_connections={maximum} needs more than the {descriptors} descriptors this process may open, "
            f"of which {_MIN_OTHER_DESCRIPTORS} are for other uses; lower it, or raise the limit (ulimit -n)"
        )
    return maximum


class HttpConnection(Protocol):
    def drop(self) -> None:
        """Close at once."""


class Access(Enum):
    OPEN = auto()
    PROBES_ONLY = auto()  # the limit is reached: only probes are answered
    REFUSED = auto()


class OpenConnections:
    """A new connection over the limit replaces an idle one. Each address may have a share of the limit."""

    def __init__(self, maximum: int, share: float, on_refusal: Callable[[str], None]) -> None:
        self.maximum = maximum
        self._open = _Pool(maximum, share)
        self._reserve = _Pool(_NUM_RESERVE, share)
        self.on_refusal = on_refusal
        self._num_refused = 0  # since the last log line
        self._may_log = at_most_every(_LOG_SECONDS)

    def admit(self, connection: HttpConnection, peer: str) -> Access:
        if self._open.admit(connection, peer):
            return Access.OPEN
        return Access.PROBES_ONLY if self._reserve.admit(connection, peer) else Access.REFUSED

    def refused(self) -> None:
        """Counts a connection, or a request on one, that was refused."""
        self.on_refusal("connections")
        self._num_refused += 1
        if self._may_log():
            logger.warning(
                "%d connections were turned away: %d are open, %d may be (--max-connections), "
                "%d of them from one address (--max-client-share)",
                self._num_refused,
                len(self._open),
                self.maximum,
                self._open.max_per_peer,
            )
            self._num_refused = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def is_full(self) -> bool:
        """Whether a new client would be refused."""
        return len(self._open) >= self.maximum and self._open.oldest_idle() is None

    def drop_idle(self) -> None:
        """Frees a descriptor, if a connection is idle. Called when the process has none left."""
        victim = self._open.oldest_idle()
        if victim is not None:
            self._open.drop(victim)

    def mark_idle(self, connection: HttpConnection) -> None:
        for pool in (self._open, self._reserve):
            pool.mark_idle(connection)

    def mark_busy(self, connection: HttpConnection) -> None:
        for pool in (self._open, self._reserve):
            pool.mark_busy(connection)

    def remove(self, connection: HttpConnection) -> None:
        for pool in (self._open, self._reserve):
            pool.remove(connection)


class _Pool:
    def __init__(self, maximum: int, share: float) -> None:
        self._maximum = maximum
        self.max_per_peer = max(1, int(maximum * share))
        self._peers: dict[HttpConnection, str] = {}
        self._counts: Counter[str] = Counter()
        self._idle: dict[str, dict[HttpConnection, float]] = {}  # by peer: idle since, the oldest first

    def __len__(self) -> int:
        return len(self._peers)

    def admit(self, connection: HttpConnection, peer: str) -> bool:
        has_max = self._counts[peer] >= self.max_per_peer
        if has_max or len(self) >= self._maximum:
            victim = self.oldest_idle(peer if has_max else None)
            if victim is None:
                return False
            self.drop(victim)
        self._peers[connection] = peer
        self._counts[peer] += 1
        self.mark_idle(connection)
        return True

    def oldest_idle(self, peer: str | None = None) -> HttpConnection | None:
        """This peer's; without one, that of the peer with the most idle connections."""
        if peer is None:
            peer = max(self._idle, key=lambda name: len(self._idle[name]), default="")
        connection, since = next(iter(self._idle.get(peer, {}).items()), (None, 0.0))
        return connection if time.monotonic() - since > _MIN_IDLE_SECONDS else None

    def drop(self, connection: HttpConnection) -> None:
        self.remove(connection)  # now: the transport reports its end later
        connection.drop()

    def mark_idle(self, connection: HttpConnection) -> None:
        if connection in self._peers:
            self._idle.setdefault(self._peers[connection], {})[connection] = time.monotonic()

    def mark_busy(self, connection: HttpConnection) -> None:
        peer = self._peers.get(connection, "")
        idle = self._idle.get(peer, {})
        idle.pop(connection, None)
        if not idle:
            self._idle.pop(peer, None)

    def remove(self, connection: HttpConnection) -> None:
        self.mark_busy(connection)
        peer = self._peers.pop(connection, None)
        if peer is not None:
            self._counts[peer] -= 1
            if not self._counts[peer]:
                del self._counts[peer]


def at_most_every(seconds: float) -> Callable[[], bool]:
    """A function that is true at most once in this time, so that clients cannot fill the log."""
    next_time = 0.0

    def is_due() -> bool:
        nonlocal next_time
        now = time.monotonic()
        if now < next_time:
            return False
        next_time = now + seconds
        return True

    return is_due
