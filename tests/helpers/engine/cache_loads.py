"""Made-up loads for the encoder cache, and LRU beside it. About 100 images of 64 to 1,024 slots fit.

A first quarter of each load warms the cache and is not counted.
"""

from __future__ import annotations

import heapq
import random
import zlib
from bisect import bisect
from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import accumulate, count, islice
from typing import NamedTuple, Protocol

from saccade.scheduler.encoder_cache import EncoderCache
from saccade.types.request import Tenant

SIZES = (64, 128, 256, 512, 1024)  # slots of an image, each as frequent as the others
SLOTS = 100 * sum(SIZES) // len(SIZES)
CATALOGUE = 400  # images, four times what fits


class Ask(NamedTuple):
    tenant: str
    image: str

    @property
    def slots(self) -> int:
        return SIZES[zlib.crc32(self.image.encode()) % len(SIZES)]


Load = Iterator[Ask]


# --- policies -------------------------------------------------------------------------------------------------------


class Policy(Protocol):
    def hits(self, ask: Ask) -> bool:
        """Ask for an image and let go of it."""


class Lru:
    def __init__(self, slots: int) -> None:
        self._free = slots
        self._idle: OrderedDict[Ask, None] = OrderedDict()

    def hits(self, ask: Ask) -> bool:
        if ask in self._idle:
            self._idle.move_to_end(ask)
            return True
        self._free -= ask.slots
        while self._free < 0:
            self._free += self._idle.popitem(last=False)[0].slots
        self._idle[ask] = None
        return False


class Fair:
    """The engine's own cache."""

    def __init__(self, slots: int, weights: dict[str, float] | None = None) -> None:
        self.cache = EncoderCache(slots)
        self._weights = weights or {}
        self._number = count()

    def hits(self, ask: Ask) -> bool:
        key = repr(ask).encode()
        holder = (str(next(self._number)), 0)
        tenant = Tenant(ask.tenant, self._weights.get(ask.tenant, 1.0))
        is_hit = self.cache.acquire(key, holder, tenant)
        if not is_hit:
            assert self.cache.reserve(key, ask.slots, holder, tenant=tenant)
            self.cache.encoded(key)
            self.cache.drain_evicted()
        self.cache.release(holder)
        return is_hit


# --- loads ----------------------------------------------------------------------------------------------------------


def zipf(tenant: str, seed: int = 1, exponent: float = 1.0, name: str = "", images: int = CATALOGUE) -> Load:
    """A catalogue under Zipf's law: the image of rank r comes with a frequency of 1 / r ** exponent."""
    bounds = list(accumulate(1 / rank**exponent for rank in range(1, images + 1)))
    noise = random.Random(seed)
    while True:
        yield Ask(tenant, f"{name}{bisect(bounds, noise.random() * bounds[-1])}")


def unique(tenant: str) -> Load:
    return (Ask(tenant, f"unique {number}") for number in count())


def conversations(tenant: str, times: int, lag: int, seed: int = 1) -> Load:
    """Each image comes so many times, about `lag` asks apart, and never again."""
    noise = random.Random(seed)
    due: list[tuple[int, int, int]] = []
    number = 0
    for now in count():
        if due and due[0][0] <= now:
            _, image, left = heapq.heappop(due)
        else:
            number += 1
            image = number
            left = times
        if left > 1:
            heapq.heappush(due, (now + noise.randint(1, 2 * lag), image, left - 1))
        yield Ask(tenant, f"conversation {image}")


def scans(tenant: str) -> Load:
    """Zipf, now and then a long run of new images."""
    while_scanning = unique(tenant)
    usually = zipf(tenant)
    while True:
        yield from islice(usually, 2000)
        yield from islice(while_scanning, 1500)


def beside(one: Load, other: Load, times: int) -> Load:
    """`other` asks so many times as often."""
    for ask in one:
        yield ask
        yield from islice(other, times)


# --- runs -----------------------------------------------------------------------------------------------------------


def hit_rates(policy: Policy, load: Load, asks: int) -> dict[str, float]:
    """By tenant, after the first quarter."""
    hits: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for number, ask in enumerate(islice(load, asks)):
        is_hit = policy.hits(ask)
        if number >= asks // 4:
            hits[ask.tenant] += is_hit
            asked[ask.tenant] += 1
    return {tenant: hits[tenant] / asked[tenant] for tenant in sorted(asked)}
