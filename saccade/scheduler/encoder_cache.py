"""The encoder cache: which images' embeddings exist, which spans pin them, and their slots. No tensors.

in flight:  reserved, being encoded; cannot be evicted
pinned:     resident and held by at least one request's span; cannot be evicted
idle:       resident and not held; evicted when space is needed, in the order of encoder_eviction.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from saccade.scheduler.cache_log import CacheLog
from saccade.scheduler.encoder_eviction import FairEviction, SlotCharge
from saccade.types.media import Key
from saccade.types.request import NO_TENANT, Tenant, family_of

Holder = tuple[str, int]
"""A request and the index of one of its spans: the same image twice in a request is two holders."""


@dataclass(slots=True)
class _Entry:
    slots: int
    holders: set[Holder]
    charge: SlotCharge
    is_in_flight: bool = True

    @property
    def is_idle(self) -> bool:
        return not self.holders and not self.is_in_flight


class EncoderCache:
    """Accounting of embedding slots, keyed by content."""

    def __init__(self, slots: int, keep_idle: bool = True) -> None:
        self._slots = slots
        self._keep_idle = keep_idle
        self._entries: dict[Key, _Entry] = {}
        self._eviction = FairEviction(slots)
        self._held: dict[Holder, Key] = {}
        self._evicted: dict[Key, None] = {}  # not yet told to the runner
        self._used_slots = self._idle_slots = self.slots_in_flight = 0
        self._hits = self._misses = self._evictions = 0
        self.log: CacheLog | None = None  # gets the keys that are resident, where others ask for them

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    @property
    def space(self) -> int:
        """Slots that are free or can be freed."""
        return self._slots - self._used_slots + self._idle_slots

    def is_resident(self, key: Key) -> bool:
        entry = self._entries.get(key)
        return entry is not None and not entry.is_in_flight

    def can_ever_fit(self, slots: int) -> bool:
        return slots <= self._slots

    def space_taken_by(self, key: Key, slots: int) -> int:
        """How much smaller `space` gets when `key`, an item of so many slots, is acquired or reserved."""
        entry = self._entries.get(key)
        return slots if entry is None or entry.is_idle else 0

    def reserve(
        self,
        key: Key,
        slots: int,
        holder: Holder | None,
        keep: Collection[Key] = (),
        tenant: Tenant = NO_TENANT,
    ) -> bool:
        """Reserve slots for an encoding; may evict idle entries, none in `keep`. False: too few are left."""
        assert key not in self._entries, "reserved twice"
        assert self.can_ever_fit(slots), f"{slots} slots of {self._slots} should have been refused"
        if slots > self.space - self._idle_slots_of(keep):
            return False
        charge = self._eviction.admit(key, slots, tenant, family_of(holder[0]) if holder else None)
        while slots > self._slots - self._used_slots:
            self._evict(self._eviction.victim(keep))
        self._evicted.pop(key, None)  # it is encoded anew, which overwrites what the runner still has
        self._entries[key] = _Entry(slots, {holder} if holder else set(), charge)
        if holder:
            self._held[holder] = key
        self._used_slots += slots
        self.slots_in_flight += slots
        self._misses += 1
        return True

    def acquire(self, key: Key, holder: Holder, tenant: Tenant = NO_TENANT) -> bool:
        """Pin an entry that is resident or in flight; False if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        assert holder not in self._held, f"{holder} already holds an entry"
        if entry.is_idle:
            self._eviction.wake(entry.charge)
            self._idle_slots -= entry.slots
        self._hits += self._eviction.use(entry.charge, tenant, family_of(holder[0]))
        entry.holders.add(holder)
        self._held[holder] = key
        return True

    def release(self, holder: Holder) -> None:
        key = self._held.pop(holder)
        entry = self._entries[key]
        entry.holders.remove(holder)
        if not entry.is_idle:
            return
        self._rest(entry)
        if not self._keep_idle:
            self._evict(key)

    def encoded(self, key: Key) -> None:
        """Encoding succeeded: resident, and idle if not held."""
        entry = self._entries[key]
        self._land(entry)
        if self.log is not None:
            self.log.add(key)
        if not entry.holders:
            self._rest(entry)

    def failed(self, key: Key) -> tuple[Holder, ...]:
        """Encoding failed: the entry is gone. Returns its holders."""
        entry = self._entries.pop(key)
        self._land(entry)
        self._eviction.drop(entry.charge)
        self._used_slots -= entry.slots
        for holder in entry.holders:
            del self._held[holder]
        self._evicted[key] = None  # an older tensor may be there, evicted and reserved again in one step
        return tuple(sorted(entry.holders))

    def drain_evicted(self) -> tuple[Key, ...]:
        """Keys evicted since the last call, each once."""
        evicted = tuple(self._evicted)
        self._evicted.clear()
        return evicted

    def reset(self, untold: Iterable[Key] = ()) -> None:
        """Drop every entry. The runner is told all, and `untold` from a plan that it may never have read."""
        assert not self._held, "reset while requests hold embeddings"
        self._evicted.update(dict.fromkeys((*untold, *self._entries)))
        if self.log is not None:
            self.log.reset()
        self._entries.clear()
        self._eviction.clear()
        self._used_slots = self._idle_slots = self.slots_in_flight = 0

    def _idle_slots_of(self, keys: Collection[Key]) -> int:
        entries = [self._entries[key] for key in self._entries.keys() & keys]
        return sum(entry.slots for entry in entries if entry.is_idle)

    def _evict(self, key: Key) -> None:
        entry = self._entries.pop(key)
        self._eviction.evict(entry.charge)
        self._idle_slots -= entry.slots
        self._used_slots -= entry.slots
        self._evicted[key] = None
        self._evictions += 1
        if self.log is not None:
            self.log.remove(key)

    def _land(self, entry: _Entry) -> None:
        assert entry.is_in_flight, "an embedding arrived that nobody asked for"
        entry.is_in_flight = False
        self.slots_in_flight -= entry.slots

    def _rest(self, entry: _Entry) -> None:
        self._eviction.rest(entry.charge)
        self._idle_slots += entry.slots

    def holders(self) -> set[Holder]:
        return set(self._held)

    def in_flight(self) -> set[Key]:
        return {key for key, entry in self._entries.items() if entry.is_in_flight}

    def stats(self) -> dict[str, int]:
        return {
            "slots_total": self._slots,
            "slots_used": self._used_slots,
            "slots_pinned": self._used_slots - self._idle_slots - self.slots_in_flight,
            "slots_idle": self._idle_slots,
            "slots_in_flight": self.slots_in_flight,
            "entries": len(self._entries),
            "hits": self._hits,
            "misses": self._misses,
            "evictions": self._evictions,
        }

    def tenants(self) -> dict[str, dict[str, int]]:
        """Hits, misses and slots by the label of a tenant."""
        return self._eviction.tenants()

    def check(self) -> None:
        """The conservation laws."""
        entries = self._entries
        idle = {key for key, entry in entries.items() if entry.is_idle}
        self._eviction.check([entry.charge for entry in entries.values()], idle)
        assert self._used_slots == sum(entry.slots for entry in entries.values()), "used slots miscounted"
        assert self._idle_slots == sum(entries[key].slots for key in idle), "idle slots miscounted"
        flight = sum(entry.slots for entry in entries.values() if entry.is_in_flight)
        assert self.slots_in_flight == flight, "slots in flight miscounted"
        assert self._used_slots <= self._slots, f"{self._used_slots} slots used of {self._slots}"
        by_holder = {holder: key for key, entry in entries.items() for holder in entry.holders}
        assert by_holder == self._held, "holders and entries disagree"
        assert not self._evicted.keys() & entries.keys(), "an entry is about to be dropped by the runner"
