"""Pictures kept by name: whose they are, and how much memory all of them may take."""

from __future__ import annotations

import tracemalloc

import pytest

from saccade.server.request.media_uuids import MAX_UUID_CHARS, UuidCache


def test_a_name_belongs_to_its_owner() -> None:
    cache = UuidCache(1 << 20)
    cache.put(b"a", "cat", b"of a")
    cache.put(b"b", "cat", b"of b")
    assert (cache.get(b"a", "cat"), cache.get(b"b", "cat"), cache.get(b"", "cat")) == (b"of a", b"of b", None)


def test_the_longest_unused_goes_first() -> None:
    cache = UuidCache(3 * 2000)
    for name in "abc":
        cache.put(b"", name, bytes(1000))
    cache.get(b"", "a")
    cache.put(b"", "d", bytes(1000))
    assert [name for name in "abcd" if cache.get(b"", name)] == ["a", "c", "d"]


def test_a_name_given_again_has_the_new_bytes_and_counts_once() -> None:
    cache = UuidCache(2 * 2000)
    cache.put(b"", "other", bytes(1000))
    for number in range(10):
        cache.put(b"", "same", bytes([number]) * 1000)
    assert cache.get(b"", "same") == b"\x09" * 1000
    assert cache.get(b"", "other") is not None


def test_what_is_larger_than_all_of_it_is_not_kept() -> None:
    cache = UuidCache(1000)
    cache.put(b"", "large", bytes(1001))
    assert cache.get(b"", "large") is None
    UuidCache(0).put(b"", "none", b"")


@pytest.mark.parametrize("length", [1, MAX_UUID_CHARS])
def test_many_tiny_images_take_no_more_memory_than_the_cache_may(length: int) -> None:
    limit = 1 << 20
    cache = UuidCache(limit)
    tracemalloc.start()
    try:
        for number in range(20_000):
            owner, name = number.to_bytes(32), chr(0x10000 + number) * length  # four bytes a character
            cache.put(owner, name, b"")
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < limit
