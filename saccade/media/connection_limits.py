"""Connection slots for media fetches: limits in total and per client, request and host, shared fairly."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import NamedTuple

Waiter = asyncio.Future[None]


class SlotLimits(NamedTuple):
    """Maximum of concurrent connections, in total and per owner."""

    total: int = 64
    client: int = 16
    request: int = 4
    host: int = 32


class Owners(NamedTuple):
    """The owners that a connection is counted for."""

    client: str
    request: object  # the same for all fetches of one request
    host: str


class Slot:
    """The right to one connection."""

    def __init__(self) -> None:
        self.work: asyncio.Future[list[str]] | None = None  # the slot stays taken until it ends


class Slots:
    def __init__(self, limits: SlotLimits) -> None:
        self._limits = limits
        self._held: Counter[tuple[str, object]] = Counter()  # by kind and name of owner
        self._waiting: dict[str, dict[Waiter, Owners]] = {}  # by client, then in order of arrival
        self.num_taken = 0

    @asynccontextmanager
    async def taken(self, owners: Owners) -> AsyncIterator[Slot]:
        """Wait for a slot and free it afterwards."""
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
        if self._has_capacity(owners):  # waiters lack it, or they would have been served when it was freed
            self._count(owners, 1)
            return
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owners.client, {})[waiter] = owners
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._remove(waiter, owners)
            else:  # the slot was granted but the task is gone
                self._give_back(owners)
            raise

    def _give_back(self, owners: Owners) -> None:
        self._count(owners, -1)
        while head := self._next():
            waiter, owners = head
            self._remove(waiter, owners)
            self._count(owners, 1)
            waiter.set_result(None)

    def _next(self) -> tuple[Waiter, Owners] | None:
        """The longest waiter of the client with the fewest connections, unless that is at its limit."""
        for client in sorted(self._waiting, key=lambda client: self._held["client", client]):
            if self._held["client", client] >= self._limits.client:
                return None
            for waiter, owners in self._waiting[client].items():
                if self._has_capacity(owners) and not waiter.done():
                    return waiter, owners
        return None

    def _remove(self, waiter: Waiter, owners: Owners) -> None:
        waiters = self._waiting[owners.client]
        del waiters[waiter]
        if not waiters:
            del self._waiting[owners.client]

    def _has_capacity(self, owners: Owners) -> bool:
        if self.num_taken >= self._limits.total:
            return False
        return all(self._held[kind, name] < getattr(self._limits, kind) for kind, name in _named(owners))

    def _count(self, owners: Owners, change: int) -> None:
        self.num_taken += change
        for owner in _named(owners):
            self._held[owner] += change
            if not self._held[owner]:
                del self._held[owner]


def _named(owners: Owners) -> Iterator[tuple[str, object]]:
    return zip(Owners._fields, owners, strict=True)
