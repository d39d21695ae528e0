"""Which idle embeddings are evicted first: by shares between tenants, by second sight within one. No tensors.

    encoded ──► probation ── another request uses it ──► protected
                    │ evicted                                │ evicted
                    ▼                                        ▼
                  ghosts (keys only): an image that comes back from here is protected at once

Everything is counted in slots. The work of encoding grows with them, so a slot is worth the same in small
images and in large ones, and within a segment the least recently used entry goes first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from saccade.scheduler.tenant_share import counted_as
from saccade.types.media import Key
from saccade.types.request import OTHER_LABEL, Tenant

_MAX_TENANTS = 64  # of either kind with an account of their own; further ones share one
_SHARED = ""  # that of requests without a tenant
_MAX_GHOSTS = 4096  # keys per segment
_STALE_AFTER = 4  # whole caches encoded without a request of a tenant: its share is lent


@dataclass(slots=True)
class _Segment:
    slots: int = 0  # of all its entries: in flight, pinned and idle
    idle: OrderedDict[Key, None] = field(default_factory=OrderedDict)  # least recently used first
    ghosts: OrderedDict[Key, int] = field(default_factory=OrderedDict)  # evicted, with their slots
    ghost_slots: int = 0

    def oldest(self, keep: Collection[Key]) -> Key | None:
        """The least recently used idle entry that is not to be kept."""
        for key in self.idle:
            if key not in keep:
                return key
        return None

    def remember(self, key: Key, slots: int, max_slots: int) -> None:
        self.ghosts[key] = slots
        self.ghost_slots += slots
        while self.ghost_slots > max_slots or len(self.ghosts) > _MAX_GHOSTS:
            self.ghost_slots -= self.ghosts.popitem(last=False)[1]


@dataclass(slots=True)
class _Counts:
    hits: int = 0
    misses: int = 0


@dataclass(slots=True, eq=False)
class _Account:
    """A tenant's part of the cache."""

    weight: float = 1.0
    label: str = ""
    is_other: bool = False  # it has no label of its own
    probation: _Segment = field(default_factory=_Segment)
    protected: _Segment = field(default_factory=_Segment)
    target: float = 0.0  # slots of probation that have proven useful; the rest of it is evicted first
    asked_at: int = 0  # slots encoded by all tenants when it last asked for an image

    @property
    def slots(self) -> int:
        return self.probation.slots + self.protected.slots

    def recall(self, key: Key, max_target: int) -> bool:
        """Whether it was evicted from here lately. Then the segment it was evicted from gets more slots.

        As in ARC: an image that comes back soon after its eviction shows which segment was too small.
        """
        probation = self.probation
        protected = self.protected
        for segment, other, sign in ((probation, protected, 1), (protected, probation, -1)):
            if key in segment.ghosts:
                step = max(1.0, other.ghost_slots / max(1, segment.ghost_slots))
                slots = segment.ghosts.pop(key)
                segment.ghost_slots -= slots
                self.target = min(max(0.0, self.target + sign * step * slots), max_target)
                return True
        return False


@dataclass(slots=True, eq=False)
class SlotCharge:
    """An entry of the cache, as its tenant is charged for it: the last one that asked for the image."""

    key: Key
    slots: int
    account: _Account
    is_proven: bool  # wanted by a second request, or a ghost before
    requester: str | None  # the first request that used it, whatever its `n`; None: encoded ahead, not used

    @property
    def segment(self) -> _Segment:
        """What is encoded ahead is protected until it is used: first-time images must not evict it before."""
        is_protected = self.is_proven or self.requester is None
        return self.account.protected if is_protected else self.account.probation


class FairEviction:
    """Orders the idle entries of all tenants."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._encoded_slots = 0  # since the start: the clock by which tenants become stale
        self._accounts: dict[str, _Account] = {}
        self._counts: dict[str, _Counts] = {}  # by label, also of tenants whose account is gone

    def admit(self, key: Key, slots: int, tenant: Tenant, requester: str | None) -> SlotCharge:
        """An image is about to be encoded."""
        self._encoded_slots += slots
        account = self._account(tenant)
        self._count(tenant).misses += 1
        is_proven = any(other.recall(key, self._slots) for other in self._accounts.values())
        charge = SlotCharge(key, slots, account, is_proven, requester)
        charge.segment.slots += slots
        return charge

    def use(self, charge: SlotCharge, tenant: Tenant, requester: str) -> bool:
        """A request pins an entry that is not idle now. Whether that is a hit."""
        charge.segment.slots -= charge.slots
        is_hit = charge.requester is not None
        if charge.requester is None:
            charge.requester = requester
        elif charge.requester != requester:  # not the same image twice in one request, nor its n outputs
            charge.is_proven = True
        charge.account = self._account(tenant)
        self._count(tenant).hits += is_hit
        charge.segment.slots += charge.slots
        return is_hit

    def rest(self, charge: SlotCharge) -> None:
        charge.segment.idle[charge.key] = None

    def wake(self, charge: SlotCharge) -> None:
        del charge.segment.idle[charge.key]

    def drop(self, charge: SlotCharge) -> None:
        """An entry that is not idle is gone."""
        charge.segment.slots -= charge.slots

    def evict(self, charge: SlotCharge) -> None:
        """An idle entry is gone."""
        self.wake(charge)
        self.drop(charge)
        charge.segment.remember(charge.key, charge.slots, self._slots)

    def victim(self, keep: Collection[Key]) -> Key:
        """The idle entry to evict next, not one in `keep`. There must be one."""
        victim = None
        highest = (0, 0.0, False)
        for account in self._accounts.values():
            for segment in (account.probation, account.protected):
                key = segment.oldest(keep)
                if key is not None:
                    rank = self._rank(account, segment)
                    if rank > highest:
                        victim = key
                        highest = rank
        assert victim is not None, "no idle entry is left to evict"
        return victim

    def _rank(self, account: _Account, segment: _Segment) -> tuple[int, float, bool]:
        """The highest is evicted from.

        3: What tenants left that have become stale.
        2: Probation beyond its target: first-time images evict each other, whichever tenant's.
        1: The tenant with the most slots for its weight. A full cache has one at or above its share.
        """
        is_probation = segment is account.probation
        if self._is_stale(account):
            return 3, -account.asked_at, is_probation
        if is_probation and segment.slots > account.target:
            return 2, (segment.slots - account.target) / account.weight, True
        return 1, account.slots / account.weight, not is_probation

    def _is_stale(self, account: _Account) -> bool:
        return self._encoded_slots - account.asked_at > _STALE_AFTER * self._slots

    def _count(self, tenant: Tenant) -> _Counts:
        return self._counts.setdefault(counted_as(tenant, self._counts.keys()), _Counts())

    def _account(self, tenant: Tenant) -> _Account:
        account = self._accounts.get(tenant.name) or self._open_account(tenant)
        account.weight = tenant.weight
        account.label = counted_as(tenant, self._counts.keys())
        if account is self._accounts.get(_SHARED) and tenant.name != _SHARED:
            weights = [other.weight for name, other in self._accounts.items() if name != _SHARED]
            account.weight = sum(weights) / len(weights)  # as one more tenant, whichever asked last
            account.label = OTHER_LABEL
        account.asked_at = self._encoded_slots
        return account

    def _open_account(self, tenant: Tenant) -> _Account:
        """Where there are too many, one gives way that has proven no use for its own.

        Tenants with a label of their own are counted apart: throw-away names keep no account from them.
        """
        is_other = tenant.label == OTHER_LABEL
        names = [name for name in self._accounts if name != _SHARED]
        alike = [name for name in names if self._accounts[name].is_other == is_other]
        if tenant.name == _SHARED or len(alike) < _MAX_TENANTS:
            return self._accounts.setdefault(tenant.name, _Account(is_other=is_other))
        idle = [name for name in alike if self._is_unproven(self._accounts[name])]
        if not idle:
            return self._accounts.setdefault(_SHARED, _Account(is_other=True))
        self._fold(min(idle, key=lambda name: self._accounts[name].asked_at))
        return self._accounts.setdefault(tenant.name, _Account(is_other=is_other))

    def _is_unproven(self, account: _Account) -> bool:
        return not account.protected.slots or self._is_stale(account)

    def _fold(self, name: str) -> None:
        """An account becomes part of the shared one: its entries stay, and are the first to go there."""
        account = self._accounts.pop(name)
        shared = self._accounts.setdefault(_SHARED, _Account(account.weight, OTHER_LABEL, is_other=True))
        for segment, common in ((account.probation, shared.probation), (account.protected, shared.protected)):
            common.slots += segment.slots
            common.idle = OrderedDict.fromkeys((*segment.idle, *common.idle))
        account.probation = shared.probation  # entries know the account that they were charged to
        account.protected = shared.protected

    def clear(self) -> None:
        """Every entry is gone; counters stay."""
        for account in self._accounts.values():
            account.probation = _Segment()
            account.protected = _Segment()

    def tenants(self) -> dict[str, dict[str, int]]:
        """By label."""
        counters = {
            label: {"hits": counts.hits, "misses": counts.misses, "slots": 0}
            for label, counts in self._counts.items()
        }
        for account in self._accounts.values():
            none = {"hits": 0, "misses": 0, "slots": 0}
            counters.setdefault(account.label, none)["slots"] += account.slots
        return counters

    def _segments(self) -> Iterator[_Segment]:
        for account in self._accounts.values():
            yield account.probation
            yield account.protected

    def check(self, charges: Iterable[SlotCharge], idle: set[Key]) -> None:
        """The conservation laws: each entry is charged once, and a ghost has no entry."""
        slots = {id(segment): 0 for segment in self._segments()}
        order = {id(segment): set[Key]() for segment in self._segments()}
        ghosts = Counter(key for segment in self._segments() for key in segment.ghosts)
        for charge in charges:
            slots[id(charge.segment)] += charge.slots
            order[id(charge.segment)] |= {charge.key} & idle
            assert charge.key not in ghosts, "an entry is a ghost as well"
        for segment in self._segments():
            assert segment.slots == slots[id(segment)], "slots of a tenant miscounted"
            assert segment.idle.keys() == order[id(segment)], "idle entries and the eviction order disagree"
            assert segment.ghost_slots == sum(segment.ghosts.values()) <= self._slots, "ghosts miscounted"
        assert max(ghosts.values(), default=1) == 1, "an image is a ghost twice"
