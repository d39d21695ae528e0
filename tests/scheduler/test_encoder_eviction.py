"""Which embeddings the encoder cache evicts: shares of tenants, second sight, ghosts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from saccade.scheduler import encoder_eviction
from saccade.scheduler.encoder_cache import EncoderCache
from saccade.types.media import Key
from saccade.types.request import Tenant
from tests.helpers.engine.cache_loads import (
    SLOTS,
    Fair,
    Load,
    Lru,
    beside,
    conversations,
    hit_rates,
    scans,
    unique,
    zipf,
)
from tests.helpers.engine.scheduling import FakeImage, Rig, key_of, make_request

A, B = Tenant("a"), Tenant("b")
_request_ids = (f"r{number}" for number in count())


def ask(cache: EncoderCache, name: str, slots: int = 1, tenant: Tenant = B, request: str | None = None) -> bool:
    """Whether it was there. One request uses it and ends."""
    holder = (request or next(_request_ids), 0)
    is_hit = cache.acquire(key_of(name), holder, tenant)
    if not is_hit:
        assert cache.reserve(key_of(name), slots, holder, tenant=tenant)
        cache.encoded(key_of(name))
    cache.release(holder)
    cache.check()
    return is_hit


def kept(cache: EncoderCache, names: str) -> str:
    return "".join(name for name in names if key_of(name) in cache)


# --- second sight -----------------------------------------------------------------------------------------------------


def test_new_images_do_not_evict_what_a_second_request_used() -> None:
    cache = EncoderCache(4)
    for name in "xyxy":
        ask(cache, name)
    for number in range(12):
        ask(cache, f"new {number}")
    assert kept(cache, "xy") == "xy"


def test_nor_those_of_another_tenant() -> None:
    cache = EncoderCache(4)
    for name in "xyzxyz":
        ask(cache, name)
    for number in range(12):
        ask(cache, f"new {number}", tenant=A)
    assert kept(cache, "xyz") == "xyz", "beyond its half, but the other tenant has proven no use for it"


def test_an_image_that_comes_back_after_its_eviction_is_protected() -> None:
    cache = EncoderCache(4)
    for name in "xyzxyz":
        ask(cache, name)
    ask(cache, "p")
    ask(cache, "q")  # evicts p, the only first-time image
    assert not ask(cache, "p")
    for number in range(12):
        ask(cache, f"new {number}")
    assert kept(cache, "p") == "p"


def test_a_request_that_uses_its_image_again_proves_nothing() -> None:
    cache = EncoderCache(2)
    for name, request in (("y", "s"), ("y", "t"), ("x", "r"), ("x", "r"), ("z", "u")):
        ask(cache, name, request=request)
    assert kept(cache, "xyz") == "yz"


def test_the_n_outputs_of_a_request_are_one_use() -> None:
    cache = EncoderCache(2)
    for name, request in (("y", "s/0"), ("y", "t/0"), ("x", "r/0"), ("x", "r/1"), ("z", "u/0")):
        ask(cache, name, request=request)
    assert kept(cache, "xyz") == "yz"


def test_what_is_encoded_ahead_is_not_evicted_by_new_images_before_its_use() -> None:
    cache = EncoderCache(4)
    assert cache.reserve(key_of("ahead"), 1, None, tenant=B)
    cache.encoded(key_of("ahead"))
    for number in range(12):
        ask(cache, f"new {number}", tenant=A)
    assert cache.acquire(key_of("ahead"), ("r", 0), B)
    cache.release(("r", 0))
    for number in range(12, 24):
        ask(cache, f"new {number}", tenant=B)
    assert key_of("ahead") not in cache, "one use is one sight"


@pytest.mark.parametrize(("between", "is_remembered"), [(4, True), (5, False)])
def test_ghosts_of_one_whole_cache_are_remembered(between: int, is_remembered: bool) -> None:
    cache = EncoderCache(4)
    for name in "uvwxuvwx":
        ask(cache, name)
    ask(cache, "early", tenant=A)
    for number in range(between):
        ask(cache, f"new {number}", tenant=A)  # each evicts the one before
    ask(cache, "early", tenant=A)
    ask(cache, "last", tenant=A)
    assert (key_of("early") in cache) == is_remembered


# --- shares -----------------------------------------------------------------------------------------------------------


def test_a_tenant_gets_its_share_back_with_images_that_it_uses_again() -> None:
    cache = EncoderCache(4)
    for name in "wxyzwxyz":
        ask(cache, name)
    for name in "pqpqpq":
        ask(cache, name, tenant=A)
    assert kept(cache, "pq") == "pq"
    assert kept(cache, "wxyz") == "yz"


@pytest.mark.parametrize(("weight", "share"), [(1.0, 6), (2.0, 8), (5.0, 10)])
def test_shares_follow_the_weights(weight: float, share: int) -> None:
    cache = EncoderCache(12)
    for _ in range(4):
        for number in range(12):
            ask(cache, f"a {number}", tenant=A)
            ask(cache, f"b {number}", tenant=Tenant("b", weight))
    assert cache.tenants()["b"]["slots"] == pytest.approx(share, abs=1)


def test_the_share_of_a_tenant_that_asks_no_more_is_lent() -> None:
    cache = EncoderCache(4)
    for name in "xyxy":
        ask(cache, name, tenant=A)
    for number in range(4 * 4 + 2):
        ask(cache, f"new {number}")
    assert kept(cache, "xy") == ""


def test_an_entry_is_charged_to_the_tenant_that_used_it_last() -> None:
    cache = EncoderCache(4)
    ask(cache, "x", 3, tenant=A)
    ask(cache, "x", 3, tenant=B)
    assert cache.tenants() == {
        "a": {"hits": 0, "misses": 1, "slots": 0},
        "b": {"hits": 1, "misses": 0, "slots": 3},
    }


def accounts(cache: EncoderCache) -> set[str]:
    return set(cache._eviction._accounts)


def test_tenants_beyond_the_number_of_accounts_share_one() -> None:
    cache = EncoderCache(1000)
    for number in range(70):
        ask(cache, f"x{number}", tenant=Tenant(f"t{number}"))
        ask(cache, f"x{number}", tenant=Tenant(f"t{number}"))
    assert accounts(cache) == {"", *(f"t{number}" for number in range(64))}
    assert cache.tenants()["other"]["slots"] == 6 and cache.tenants()["t69"] == {"hits": 1, "misses": 1, "slots": 0}


def test_throw_away_tenants_keep_no_account_from_those_that_use_their_images_again() -> None:
    cache = EncoderCache(1000)
    for name in "xyxy":
        ask(cache, name, tenant=Tenant("early", label="other"))
    for number in range(300):
        ask(cache, f"once {number}", tenant=Tenant(f"t{number}", label="other"))
    for name in "pqpq":
        ask(cache, name, tenant=Tenant("late", label="other"))
    assert {"early", "late", ""} < accounts(cache) and len(accounts(cache)) == 65
    assert kept(cache, "xypq") == "xypq" and cache.tenants() == {"other": {"hits": 4, "misses": 304, "slots": 304}}


def test_tenants_that_the_operator_named_have_accounts_beside_all_others() -> None:
    cache = EncoderCache(1000)
    for number in range(70):
        for _ in range(2):
            ask(cache, f"x{number}", tenant=Tenant(f"t{number}", label="other"))
    ask(cache, "y", tenant=Tenant("acme", label="acme"))
    assert "acme" in accounts(cache) and "t69" not in accounts(cache)


def test_a_stale_account_gives_way_to_a_new_tenant() -> None:
    cache = EncoderCache(1000)
    for number in range(64):
        for _ in range(2):
            ask(cache, f"x{number}", tenant=Tenant(f"t{number}"))
    for number in range(6):
        ask(cache, f"new {number}", slots=800, tenant=Tenant("t0"))
    ask(cache, "y", tenant=Tenant("late"))
    assert "late" in accounts(cache) and "t1" not in accounts(cache)


def test_the_weight_of_the_shared_account_is_not_that_of_the_last_tenant() -> None:
    cache = EncoderCache(1000)
    for number in range(64):
        for _ in range(2):
            ask(cache, f"x{number}", tenant=Tenant(f"t{number}", 2.0))
    for weight in (1000.0, 0.001):
        ask(cache, f"y {weight}", tenant=Tenant(f"w{weight}", weight))
        assert cache._eviction._accounts[""].weight == 2.0


def test_the_scheduler_charges_the_tenants_of_its_requests() -> None:
    rig = Rig()
    for name, tenant in (("r", A), ("s", B), ("t", B)):
        request = make_request(name, FakeImage("x", 6), 3, first_token=ord(name))
        rig.scheduler.add(replace(request, tenant=tenant), 0.0)
    rig.add("u", [1, 2, 3, 4, 5], FakeImage("y", 9), 3)
    rig.drain()
    found = rig.scheduler.stats()["encoder_cache_tenants"]
    assert {name: counts["misses"] for name, counts in found.items()} == {"a": 1, "b": 0, "": 1}
    assert found[""]["slots"] == 9 and found["a"]["slots"] + found["b"]["slots"] == 6


# --- goals ------------------------------------------------------------------------------------------------------------


def flooded(times: int) -> Load:
    return beside(zipf("B"), unique("A"), times)


@pytest.mark.parametrize("times", [1, 4, 16])
def test_a_flood_of_new_images_leaves_a_catalogue_its_share(times: int) -> None:
    alone = max(hit_rates(policy(SLOTS // 2), zipf("B"), 1500)["B"] for policy in (Lru, Fair))
    assert hit_rates(Fair(SLOTS), flooded(times), 1500 * (times + 1))["B"] >= 0.9 * alone


def test_under_lru_the_same_flood_takes_more_than_half_of_its_hits() -> None:
    alone = hit_rates(Lru(SLOTS // 2), zipf("B"), 1500)["B"]
    assert hit_rates(Lru(SLOTS), flooded(16), 1500 * 17)["B"] < 0.5 * alone


@pytest.mark.parametrize("times", [1, 4])
def test_the_tenant_of_new_images_that_are_soon_asked_again_loses_nothing(times: int) -> None:
    loads = [beside(zipf("B"), conversations("A", 3, 8), times) for _ in range(2)]
    lru, fair = (hit_rates(policy(SLOTS), load, 6000) for policy, load in zip((Lru, Fair), loads, strict=True))
    assert fair["A"] >= lru["A"] - 0.01


@pytest.mark.parametrize("load", [zipf, scans, lambda tenant: conversations(tenant, 3, 10)])
def test_one_tenant_alone_hits_as_often_as_with_lru(load) -> None:
    lru, fair = (hit_rates(policy(SLOTS), load("B"), 6000)["B"] for policy in (Lru, Fair))
    assert fair >= lru - 0.01


# --- laws -------------------------------------------------------------------------------------------------------------

TENANTS = st.builds(Tenant, st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 4.0]))
ASKS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=60)


@settings(max_examples=80, deadline=None)
@given(ASKS, st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 4.0])))
def test_no_tenant_loses_protected_images_to_another_while_it_is_within_its_share(
    asks: list[tuple[str, int]], weights: dict[str, float]
) -> None:
    slots = 12
    cache = EncoderCache(slots)
    seen: Counter[tuple[str, int]] = Counter()
    encoded = 0
    for name, number in asks:
        before = cache.tenants()
        total = sum(weights.get(other, 1.0) for other in {*before, name})
        size = number % 3 + 1
        encoded += 0 if ask(cache, f"{name}{number}", size, Tenant(name, weights.get(name, 1.0))) else size
        if encoded > 4 * slots:
            return  # some may have become stale
        lost = {key for key in seen if key_of(f"{key[0]}{key[1]}") not in cache}
        for other in {other for other, image in lost if seen[other, image] > 1} - {name}:
            share = (slots - size) * weights.get(other, 1.0) / total  # the new image has to go somewhere
            assert before[other]["slots"] > share
        for key in lost:
            del seen[key]
        seen[name, number] += 1


class Cache(RuleBasedStateMachine):
    """Requests of three tenants come, wait for their images and go; look-ahead encodes for none in particular."""

    @initialize(slots=st.integers(4, 12), keep_idle=st.booleans(), max_tenants=st.sampled_from([1, 2, 64]))
    def start(self, slots: int, keep_idle: bool, max_tenants: int) -> None:
        encoder_eviction._MAX_TENANTS = max_tenants
        self.cache = EncoderCache(slots, keep_idle)
        self.held: dict[tuple[str, int], Key] = {}

    @rule(
        request=st.sampled_from("rstu"),
        index=st.integers(0, 1),
        number=st.integers(0, 7),
        tenant=TENANTS,
    )
    def enter(self, request: str, index: int, number: int, tenant: Tenant) -> None:
        holder = (request, index)
        key = key_of(str(number))
        if holder in self.held:
            return
        space = self.cache.space
        fits = self.cache.space_taken_by(key, number % 4 + 1) <= space
        is_there = self.cache.acquire(key, holder, tenant)
        if is_there or self.cache.reserve(key, number % 4 + 1, holder, tenant=tenant):
            self.held[holder] = key
            assert fits
        else:
            assert not fits and self.cache.space == space

    @rule(
        number=st.integers(0, 7),
        keep=st.sets(st.integers(0, 7)),
        tenant=TENANTS,
    )
    def look_ahead(self, number: int, keep: set[int], tenant: Tenant) -> None:
        key = key_of(str(number))
        keys = {key_of(str(other)) for other in keep}
        there = {other for other in keys if other in self.cache}
        if key not in self.cache:
            self.cache.reserve(key, number % 4 + 1, None, keep=keys, tenant=tenant)
        assert all(other in self.cache for other in there), "evicted although it was to be kept"

    @rule(data=st.data(), is_good=st.booleans())
    @precondition(lambda self: self.cache.in_flight())
    def land(self, data: st.DataObject, is_good: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.cache.in_flight())))
        if is_good:
            self.cache.encoded(key)
        else:
            gone = self.cache.failed(key)
            assert set(gone) == {holder for holder, held in self.held.items() if held == key}
            for holder in gone:
                del self.held[holder]

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def leave(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.held)))
        self.cache.release(holder)
        del self.held[holder]

    @rule()
    def tell(self) -> None:
        assert not any(key in self.cache for key in self.cache.drain_evicted())

    @rule()
    @precondition(lambda self: not self.held)
    def reset(self) -> None:
        self.cache.reset()

    def teardown(self) -> None:
        encoder_eviction._MAX_TENANTS = 64

    @invariant()
    def holds(self) -> None:
        self.cache.check()
        assert self.cache.holders() == set(self.held)
        assert all(key in self.cache for key in self.held.values()), "a pinned entry was evicted"
        stats = self.cache.stats()
        tenants = self.cache.tenants().values()
        for name, total in (("hits", "hits"), ("misses", "misses"), ("slots", "slots_used")):
            assert sum(tenant[name] for tenant in tenants) == stats[total]


Cache.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestCache = Cache.TestCase
