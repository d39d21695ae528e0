"""Who may connect now: so many connections at once in all, and fewer for one client, one request and one host.

Counts and turns only; opens nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import NamedTuple

Turn = asyncio.Future[None]


class SlotLimits(NamedTuple):
    """Connections at once. One client, one request or one slow host leaves room for the others."""

    total: int = 64
    client: int = 16
    request: int = 4
    host: int = 32


class Owners(NamedTuple):
    """On whose behalf a connection is opened."""

    client: str
    request: object  # the same for all fetches of one request
    host: str


class Slot:
    """The right to one connection."""

    def __init__(self) -> None:
        self.work: asyncio.Future[list[str]] | None = None  # may outlive the fetch; the slot is not free before it ends


class Slots:
    def __init__(self, limits: SlotLimits) -> None:
        self._limits = limits
        self._held: Counter[tuple[str, object]] = Counter()  # by kind and name of owner
        self._waiting: dict[str, dict[Turn, Owners]] = {}  # by client, then in order of arrival
        self.num_taken = 0

    @asynccontextmanager
    async def taken(self, owners: Owners) -> AsyncIterator[Slot]:
        """Waits for a turn. Whatever happens inside, the slot comes back."""
        await self._take(owners)
        slot = Slot()
        try:
            yield slot
        finally:
            if slot.work is None or slot.work.done():
                self._give_back(owners)
            else:
                slot.work.add_done_callback(lambda _: self._give_back(owners))

    async def _take(self, owners: Owners) -> None:
        if self._has_room(owners):  # whoever waits has none, or would have gone when it came
            self._count(owners, 1)
            return
        turn: Turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owners.client, {})[turn] = owners
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(turn, owners)
            else:  # its turn had come, and nobody is there to take it
                self._give_back(owners)
            raise

    def _give_back(self, owners: Owners) -> None:
        self._count(owners, -1)
        while found := self._next():
            turn, owners = found
            self._leave(turn, owners)
            self._count(owners, 1)
            turn.set_result(None)

    def _next(self) -> tuple[Turn, Owners] | None:
        """Of the client that holds least, who waits longest. Clients at their limit are not looked at."""
        for client in sorted(self._waiting, key=lambda client: self._held["client", client]):
            if self._held["client", client] >= self._limits.client:
                return None
            for turn, owners in self._waiting[client].items():
                if self._has_room(owners) and not turn.done():
                    return turn, owners
        return None

    def _leave(self, turn: Turn, owners: Owners) -> None:
        waiting = self._waiting[owners.client]
        del waiting[turn]
        if not waiting:
            del self._waiting[owners.client]

    def _has_room(self, owners: Owners) -> bool:
        has_one = self.num_taken < self._limits.total
        return has_one and all(self._held[kind, name] < getattr(self._limits, kind) for kind, name in _named(owners))

    def _count(self, owners: Owners, change: int) -> None:
        self.num_taken += change
        for owner in _named(owners):
            self._held[owner] += change
            if not self._held[owner]:
                del self._held[owner]


def _named(owners: Owners) -> Iterator[tuple[str, object]]:
    return zip(Owners._fields, owners, strict=True)
