"""Hit rates of the encoder cache under made-up loads, beside LRU: `python -m benchmarks.cache_policies`. No model.

The cache holds about 100 images of 64 to 1,024 slots. A first quarter of each load warms the cache and is not counted.
"""

from __future__ import annotations

import argparse
import heapq
import random
import zlib
from bisect import bisect
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from itertools import accumulate, count, islice
from typing import NamedTuple, Protocol

from benchmarks.results import write_json
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


def loop(tenant: str, images: int) -> Load:
    return (Ask(tenant, f"loop {number % images}") for number in count())


def scans(tenant: str) -> Load:
    """Zipf, now and then a long run of new images."""
    while_scanning = unique(tenant)
    usually = zipf(tenant)
    while True:
        yield from islice(usually, 2000)
        yield from islice(while_scanning, 1500)


def shifts(tenant: str) -> Load:
    """Zipf, with another catalogue from time to time."""
    for number in count():
        yield from islice(zipf(tenant, seed=number, name=f"{number}/"), 3000)


def beside(one: Load, other: Load, times: int) -> Load:
    """`other` asks so many times as often."""
    for ask in one:
        yield ask
        yield from islice(other, times)


# --- runs -----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    name: str
    load: Callable[[], Load]
    asks: int


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


def cases() -> Iterator[Case]:
    for times in (1, 4, 16):
        asks = 5_000 * (times + 1)
        yield Case(f"B Zipf, A unique, {times}x", lambda t=times: beside(zipf("B"), unique("A"), t), asks)
    for times in (1, 4):
        asks = 5_000 * (times + 1)
        yield Case(f"B Zipf, A Zipf, {times}x", lambda t=times: beside(zipf("B"), zipf("A", 2), t), asks)
        yield Case(
            f"B Zipf, A conversations, {times}x",
            lambda t=times: beside(zipf("B"), conversations("A", 3, 8), t),
            asks,
        )
    yield Case("Zipf 1.0", lambda: zipf("B"), 10_000)
    yield Case("Zipf 0.7", lambda: zipf("B", exponent=0.7), 10_000)
    yield Case("Zipf with scans", lambda: scans("B"), 14_000)
    yield Case("Zipf, shifting", lambda: shifts("B"), 15_000)
    yield Case("conversations of 3, lag 10", lambda: conversations("B", 3, 10), 10_000)
    yield Case("conversations of 3, lag 30", lambda: conversations("B", 3, 30), 10_000)
    yield Case("loop over 60 images", lambda: loop("B", 60), 10_000)
    yield Case("loop over 130 images", lambda: loop("B", 130), 10_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the rates as well")
    file = parser.parse_args().json
    rows = {}
    print(f"{'hit rate':28}  {'LRU':>18}  {'fair':>18}")
    for name, load, asks in [Case("B Zipf alone, half the slots", lambda: zipf("B"), 10_000), *cases()]:
        slots = SLOTS // 2 if "half" in name else SLOTS
        found = {policy.__name__.lower(): hit_rates(policy(slots), load(), asks) for policy in (Lru, Fair)}
        shown = ["  ".join(f"{tenant} {rate:6.1%}" for tenant, rate in rates.items()) for rates in found.values()]
        print(f"{name:28}  {shown[0]:>18}  {shown[1]:>18}", flush=True)
        rows[name] = found
    if file:
        write_json(file, {"slots": SLOTS, "hit_rates": rows})


if __name__ == "__main__":
    main()
