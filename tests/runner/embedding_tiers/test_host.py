"""Host memory in pages: conservation, order of eviction, contents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.runner.embedding_tiers.host import HostEntry, HostTier
from tests.helpers.engine.tiers import CPU, WIDTH, embedding

ROW = WIDTH * 4  # bytes of an embedding of one slot
PAGE = 64


def tier(pages: int) -> HostTier:
    return HostTier(pages * PAGE, CPU, PAGE)


def contents(host: HostTier, key: bytes) -> torch.Tensor | None:
    with host.reading(key) as entry:
        if entry is None:
            return None
        return torch.cat(host.parts(entry.pages, entry.size)).view(torch.float32).view(-1, WIDTH)


def test_the_least_recently_used_entry_goes_first() -> None:
    host = tier(pages=4)
    for name in (b"a", b"b"):
        assert host.put(name, embedding(4), None)  # two pages each
    assert contents(host, b"a") is not None
    host.put(b"c", embedding(4), None)
    assert b"a" in host and b"b" not in host and b"c" in host
    assert host.evictions == 1


def test_what_is_being_read_stays_and_a_larger_entry_is_refused() -> None:
    host = tier(pages=4)
    host.put(b"a", embedding(4, seed=1), None)
    with host.reading(b"a") as entry:
        assert entry is not None
        assert not host.put(b"large", embedding(8), None)
        assert host.put(b"b", embedding(4), None)
        host.discard(b"a")
    assert torch.equal(contents(host, b"a"), embedding(4, seed=1))
    host.check()


def test_an_entry_larger_than_the_memory_evicts_nothing() -> None:
    host = tier(pages=4)
    host.put(b"a", embedding(4), None)
    assert not host.put(b"huge", embedding(10), None)
    assert b"a" in host
    host.check()


def test_adjacent_pages_are_one_part() -> None:
    host = tier(pages=4)
    assert [part.numel() for part in host.parts((0, 1, 3), 2 * PAGE + 5)] == [2 * PAGE, 5]
    assert [part.numel() for part in host.parts((3, 1, 2), 3 * PAGE - 1)] == [PAGE, 2 * PAGE - 1]


def test_pages_in_use_are_counted_until_they_are_given_back() -> None:
    host = tier(pages=4)
    pages = host.reserve(PAGE + 1)
    assert pages is not None and host.used_bytes == 2 * PAGE
    host.check()
    host.give_back(pages)
    assert host.used_bytes == 0
    host.check()


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "read", "hold", "let go", "reserve", "insert", "give back", "discard"]),
        st.integers(0, 5),  # which key
        st.integers(1, 12),  # slots
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS, st.integers(1, 12))
def test_no_page_is_lost_and_every_entry_keeps_its_bytes(actions: list[tuple[str, int, int]], pages: int) -> None:
    host = tier(pages)
    written: dict[bytes, torch.Tensor] = {}
    held = []
    reserved: list[tuple[tuple[int, ...], int]] = []
    for number, (action, which, slots) in enumerate(actions):
        key = bytes([which])
        if action == "put" and key not in host:
            made = embedding(slots, seed=number)
            if host.put(key, made, None):
                written[key] = made
        elif action == "read":
            found = contents(host, key)
            assert found is None or torch.equal(found, written[key])
        elif action == "hold":
            held.append(host.reading(key))
            held[-1].__enter__()
        elif action == "let go" and held:
            held.pop().__exit__(None, None, None)
        elif action == "reserve" and (got := host.reserve(slots * ROW)):
            reserved.append((got, slots))
        elif action == "insert" and reserved:
            got, count = reserved.pop()
            made = embedding(count, seed=number)
            flat = made.view(torch.uint8).flatten()
            for part in host.parts(got, flat.numel()):
                part.copy_(flat[: part.numel()])
                flat = flat[part.numel() :]
            if key not in host:
                written[key] = made
            host.insert(key, HostEntry(got, count * ROW, None))
        elif action == "give back" and reserved:
            host.give_back(reserved.pop()[0])
        elif action == "discard":
            host.discard(key)
        host.check()
        assert host.used_bytes <= pages * PAGE
    for context in held:
        context.__exit__(None, None, None)
    for key in [bytes([which]) for which in range(6)]:
        found = contents(host, key)
        assert found is None or torch.equal(found, written[key])


def test_reading_ends_when_the_reader_fails() -> None:
    host = tier(pages=2)
    host.put(b"a", embedding(4), None)
    with pytest.raises(RuntimeError), host.reading(b"a"):
        raise RuntimeError
    assert host.put(b"b", embedding(4), None) and b"a" not in host
