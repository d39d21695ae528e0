"""The encoder cache: slots in flight, pinned and idle."""

from __future__ import annotations

import pytest

from saccade.scheduler.encoder_cache import EncoderCache
from tests.helpers.engine.scheduling import key_of

A, B, C = key_of("a"), key_of("b"), key_of("c")
R, S = ("r", 0), ("s", 0)


@pytest.fixture
def cache() -> EncoderCache:
    return EncoderCache(slots=10)


def make_idle(cache: EncoderCache, *entries: tuple[bytes, int]) -> None:
    for key, slots in entries:
        assert cache.reserve(key, slots, R)
        cache.encoded(key)
        cache.release(R)


def test_a_reserved_entry_is_in_flight_until_it_is_encoded(cache: EncoderCache) -> None:
    assert cache.reserve(A, 4, R)
    assert A in cache
    assert not cache.is_resident(A)
    cache.encoded(A)
    assert cache.is_resident(A)
    cache.check()


def test_an_entry_rests_idle_when_its_last_holder_leaves(cache: EncoderCache) -> None:
    cache.reserve(A, 4, R)
    cache.encoded(A)
    cache.acquire(A, S)
    cache.release(R)
    assert cache.stats()["slots_pinned"] == 4
    cache.release(S)
    assert (cache.stats()["slots_pinned"], cache.stats()["slots_idle"]) == (0, 4)
    assert cache.is_resident(A)


def test_an_entry_without_a_holder_is_idle_as_soon_as_it_is_encoded(cache: EncoderCache) -> None:
    cache.reserve(A, 4, None)
    cache.encoded(A)
    assert cache.stats()["slots_idle"] == 4
    cache.check()


def test_an_idle_entry_that_is_wanted_again_is_taken_back(cache: EncoderCache) -> None:
    make_idle(cache, (A, 4))
    assert cache.acquire(A, S)
    assert cache.stats()["slots_pinned"] == 4
    assert not cache.reserve(B, 7, R), "a pinned entry makes no room"
    cache.check()


def test_acquiring_what_is_not_there_fails(cache: EncoderCache) -> None:
    assert not cache.acquire(A, R)


def test_the_same_image_twice_in_one_request_has_two_holders(cache: EncoderCache) -> None:
    cache.reserve(A, 4, ("r", 0))
    cache.acquire(A, ("r", 1))
    cache.encoded(A)
    cache.release(("r", 0))
    assert cache.stats()["slots_pinned"] == 4


def test_room_is_made_by_evicting_the_longest_unused_idle_entry(cache: EncoderCache) -> None:
    make_idle(cache, (A, 4), (B, 4))
    cache.acquire(A, R)
    cache.release(R)  # now B is the longest unused
    assert cache.reserve(C, 4, R)
    assert cache.drain_evicted() == (B,)
    assert A in cache
    cache.check()


def test_no_more_is_evicted_than_needed(cache: EncoderCache) -> None:
    make_idle(cache, (A, 3), (B, 3))
    assert cache.reserve(C, 4, R)
    assert cache.stats()["evictions"] == 0


def test_nothing_is_evicted_when_it_would_not_be_enough(cache: EncoderCache) -> None:
    make_idle(cache, (A, 4))
    cache.reserve(B, 4, R)
    assert not cache.reserve(C, 7, S)
    assert A in cache
    assert cache.drain_evicted() == ()


def test_entries_in_flight_are_never_evicted(cache: EncoderCache) -> None:
    cache.reserve(A, 6, None)
    assert not cache.reserve(B, 6, R)


def test_entries_to_keep_are_not_evicted(cache: EncoderCache) -> None:
    make_idle(cache, (A, 5), (B, 5))
    assert not cache.reserve(C, 6, None, keep={A})
    assert cache.reserve(C, 5, None, keep={A})
    assert cache.drain_evicted() == (B,)


def test_an_evicted_key_is_told_once(cache: EncoderCache) -> None:
    make_idle(cache, (A, 8))
    cache.reserve(B, 8, R)
    assert cache.drain_evicted() == (A,)
    assert cache.drain_evicted() == ()


def test_a_key_evicted_and_reserved_again_before_it_was_told_is_not_told(cache: EncoderCache) -> None:
    make_idle(cache, (A, 8))
    make_idle(cache, (B, 8))
    cache.reserve(A, 8, R)
    assert cache.drain_evicted() == (B,)
    cache.check()


def test_a_failed_flight_vanishes_and_names_its_holders(cache: EncoderCache) -> None:
    cache.reserve(A, 4, R)
    cache.acquire(A, S)
    assert cache.failed(A) == (R, S)
    assert A not in cache
    assert cache.stats()["slots_used"] == 0
    cache.check()


def test_a_key_evicted_and_reserved_again_is_told_after_all_when_its_flight_fails(cache: EncoderCache) -> None:
    make_idle(cache, (A, 8))
    make_idle(cache, (B, 8))
    cache.reserve(A, 8, R)
    cache.failed(A)
    assert set(cache.drain_evicted()) == {A, B}, "the runner still has the old tensor"


def test_a_flight_goes_on_when_its_holder_leaves(cache: EncoderCache) -> None:
    cache.reserve(A, 4, R)
    cache.release(R)
    assert cache.stats()["slots_in_flight"] == 4
    cache.encoded(A)
    assert cache.stats()["slots_idle"] == 4
    cache.check()


def test_without_keeping_idle_entries_the_last_release_evicts() -> None:
    cache = EncoderCache(10, keep_idle=False)
    cache.reserve(A, 4, R)
    cache.encoded(A)
    cache.acquire(A, S)
    cache.release(R)
    assert A in cache
    cache.release(S)
    assert A not in cache
    assert cache.drain_evicted() == (A,)


def test_what_was_encoded_ahead_stays_for_its_first_holder_even_if_idle_entries_are_not_kept() -> None:
    cache = EncoderCache(10, keep_idle=False)
    cache.reserve(A, 4, None)
    cache.encoded(A)
    assert cache.acquire(A, R)


def test_an_item_larger_than_the_cache_can_never_fit(cache: EncoderCache) -> None:
    assert cache.can_ever_fit(10)
    assert not cache.can_ever_fit(11)


def test_a_reservation_is_a_miss_and_each_further_holder_a_hit(cache: EncoderCache) -> None:
    cache.reserve(A, 4, R)
    cache.acquire(A, S)
    assert (cache.stats()["misses"], cache.stats()["hits"]) == (1, 1)


def test_the_first_holder_of_what_was_encoded_ahead_is_no_hit(cache: EncoderCache) -> None:
    cache.reserve(A, 4, None)
    cache.encoded(A)
    cache.acquire(A, R)
    cache.acquire(A, S)
    assert (cache.stats()["misses"], cache.stats()["hits"]) == (1, 1)


def test_the_stats_split_the_slots_by_state(cache: EncoderCache) -> None:
    make_idle(cache, (A, 2))
    cache.reserve(B, 3, R)
    cache.encoded(B)
    cache.reserve(C, 4, None)
    stats = cache.stats()
    assert stats["slots_total"] == 10
    assert (stats["slots_idle"], stats["slots_pinned"], stats["slots_in_flight"], stats["slots_used"]) == (2, 3, 4, 9)
    assert stats["entries"] == 3


def test_a_reset_drops_everything_and_tells_the_runner(cache: EncoderCache) -> None:
    make_idle(cache, (A, 2))
    cache.reserve(B, 3, None)
    cache.reset(untold=(C,))
    assert set(cache.drain_evicted()) == {A, B, C}
    assert cache.space == 10
    cache.check()
