"""Places in an arena: every byte has one owner, whatever is reserved and freed."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.engine.encoders.arena import Space, mapped, new_arena


def mappings() -> int:
    """Arenas that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:saccade-embeddings")


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=60))
def test_bytes_are_conserved_whatever_comes_and_goes(moves: list[tuple[bool, int]]) -> None:
    space = Space(2048)
    held: dict[int, int] = {}
    for frees, number in moves:
        if frees and held:
            start = list(held)[number % len(held)]
            space.free(start)
            del held[start]
        else:
            start = space.reserve(number)
            if start is not None:
                held[start] = number
        space.check()
        ends = sorted((start, start + size) for start, size in held.items())
        assert all(end <= following for (_, end), (following, _) in pairwise(ends))
        assert all(end <= space.size for _, end in ends)
    for start in held:
        space.free(start)
    space.check()
    assert space.used == 0 and space.reserve(2048) == 0


def test_a_full_space_gives_nothing_until_something_is_free() -> None:
    space = Space(256)
    first = space.reserve(100)
    assert first == 0 and space.reserve(200) is None
    space.free(first)
    assert space.reserve(200) == 0


def test_a_lost_byte_is_noticed() -> None:
    space = Space(256)
    space.reserve(64)
    space._reserved.clear()
    with pytest.raises(AssertionError, match="have no owner"):
        space.check()


def test_two_mappings_show_the_same_bytes_and_leave_nothing_behind() -> None:
    before = (mappings(), len(os.listdir("/proc/self/fd")))
    fd = new_arena(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)  # a reader of a shorter file would be killed
    ours, theirs = mapped(os.dup(fd)), mapped(fd)
    ours[5:8] = b"abc"
    assert bytes(theirs[5:8]) == b"abc" and mappings() == before[0] + 2
    del ours, theirs
    assert (mappings(), len(os.listdir("/proc/self/fd"))) == before
