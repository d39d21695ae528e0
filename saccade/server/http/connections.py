"""Who is connected, how many may be, and who must go when there is no room for somebody else.

Counts connections by the address they come from. Knows nothing of what is sent over them.
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

_FOR_OTHER_USES = 256  # descriptors: the engine, fetches, files, connections in reserve
_MIN_FOR_OTHER_USES = 128
_MAX_AUTOMATIC = 4096  # each costs memory, also when it is idle
_RESERVE = 64  # places beyond the limit, for those who ask whether the server is well
_SAFE_SECONDS = 1.0  # whoever came only now may be about to send a request
_LOG_SECONDS = 10.0


def connection_limit(asked: int | None) -> int:
    """How many connections may be open. ConfigError when the process could not open so many."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if asked is None:
        return min(max(descriptors - _FOR_OTHER_USES, descriptors // 2), _MAX_AUTOMATIC)
    if asked > max(descriptors - _MIN_FOR_OTHER_USES, descriptors // 2):
        raise ConfigError(
            f"max_connections={asked} needs more than the {descriptors} descriptors this process may open, of which "
            f"{_MIN_FOR_OTHER_USES} are for other uses; lower it, or raise the limit (ulimit -n)"
        )
    return asked


class Connection(Protocol):
    def drop(self) -> None:
        """End at once."""


class Place(Enum):
    OPEN = auto()
    PROBES = auto()  # there is no room: only health and readiness are told
    NONE = auto()


class Connections:
    """One address may have a share of the places. Idle connections make room for new ones."""

    def __init__(self, maximum: int, share: float, on_refusal: Callable[[str], None]) -> None:
        self.maximum = maximum
        self._open = _Places(maximum, share)
        self._reserve = _Places(_RESERVE, share)
        self._on_refusal = on_refusal
        self._num_refused = 0  # since the latest line in the log
        self._is_due = seldom(_LOG_SECONDS)

    def enter(self, connection: Connection, peer: str) -> Place:
        if self._open.enter(connection, peer):
            return Place.OPEN
        return Place.PROBES if self._reserve.enter(connection, peer) else Place.NONE

    def refused(self) -> None:
        """A request, or a connection, for which there was no place."""
        self._on_refusal("connections")
        self._num_refused += 1
        if self._is_due():
            logger.warning(
                "%d connections were turned away: %d are open, %d may be (--max-connections), %d of them from one "
                "address (--max-client-share)",
                self._num_refused,
                len(self._open),
                self.maximum,
                self._open.max_of_one,
            )
            self._num_refused = 0

    @property
    def is_full(self) -> bool:
        """Whether a new client would find no place."""
        return len(self._open) >= self.maximum and self._open.oldest_idle() is None

    def make_room(self) -> None:
        """Descriptors have run out for another reason: give one back."""
        self._open.drop(self._open.oldest_idle())

    def idle(self, connection: Connection) -> None:
        for places in (self._open, self._reserve):
            places.idle(connection)

    def busy(self, connection: Connection) -> None:
        for places in (self._open, self._reserve):
            places.busy(connection)

    def leave(self, connection: Connection) -> None:
        for places in (self._open, self._reserve):
            places.leave(connection)


class _Places:
    def __init__(self, maximum: int, share: float) -> None:
        self._maximum = maximum
        self.max_of_one = max(1, int(maximum * share))
        self._peers: dict[Connection, str] = {}
        self._counts: Counter[str] = Counter()
        self._idle: dict[str, dict[Connection, float]] = {}  # by peer, those idle for longest first, since when

    def __len__(self) -> int:
        return len(self._peers)

    def enter(self, connection: Connection, peer: str) -> bool:
        if self._counts[peer] >= self.max_of_one:
            victim = self.oldest_idle(peer)
        elif len(self) >= self._maximum:
            victim = self.oldest_idle()
        else:
            return self._take(connection, peer)
        self.drop(victim)
        return victim is not None and self._take(connection, peer)

    def _take(self, connection: Connection, peer: str) -> bool:
        self._peers[connection] = peer
        self._counts[peer] += 1
        self.idle(connection)
        return True

    def oldest_idle(self, peer: str | None = None) -> Connection | None:
        """Of the one who has most of them, unless a peer is named: whoever keeps many is the first to lose some."""
        if peer is None:
            peer = max(self._idle, key=lambda name: len(self._idle[name]), default="")
        connection, since = next(iter(self._idle.get(peer, {}).items()), (None, 0.0))
        return connection if time.monotonic() - since > _SAFE_SECONDS else None

    def drop(self, connection: Connection | None) -> None:
        if connection is not None:
            self.leave(connection)  # at once: that the transport has closed is reported later
            connection.drop()

    def idle(self, connection: Connection) -> None:
        if connection in self._peers:
            self._idle.setdefault(self._peers[connection], {})[connection] = time.monotonic()

    def busy(self, connection: Connection) -> None:
        peer = self._peers.get(connection, "")
        others = self._idle.get(peer, {})
        others.pop(connection, None)
        if not others:
            self._idle.pop(peer, None)

    def leave(self, connection: Connection) -> None:
        self.busy(connection)
        peer = self._peers.pop(connection, None)
        if peer is not None:
            self._counts[peer] -= 1
            if not self._counts[peer]:
                del self._counts[peer]


def seldom(seconds: float) -> Callable[[], bool]:
    """Says yes at once and then no for a while: a client must not be able to fill the log."""
    due = 0.0

    def is_due() -> bool:
        nonlocal due
        now = time.monotonic()
        if now < due:
            return False
        due = now + seconds
        return True

    return is_due
