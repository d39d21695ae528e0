"""Blocks that no token to come reads are given back while a request runs, where all layers have windows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.types.attention_reach import AttentionReach
from tests.helpers.engine.random_workloads import CONFIGS, REQUESTS, assert_nothing_is_held, drive
from tests.helpers.engine.scheduling import BLOCK, Rig

LAST = AttentionReach(10)
BESIDE_PROMPT = AttentionReach(10, has_prompt=True)


def used(rig: Rig) -> int:
    return rig.scheduler.stats()["kv"]["used"]


def peak(rig: Rig) -> int:
    """KV blocks in use, at most, until all is drained."""
    most = 0
    while rig.scheduler.has_unfinished():
        rig.step()
        most = max(most, used(rig))
    return most


def test_a_long_request_holds_the_blocks_of_its_window() -> None:
    rig = Rig(reach=LAST, max_num_batched_tokens=8)
    rig.add("long", 100, max_tokens=200)
    assert peak(rig) <= (LAST.tokens + 8) // BLOCK + 2
    assert used(rig) == 0


def test_a_prompt_stays_where_every_token_reads_it() -> None:
    rig = Rig(reach=BESIDE_PROMPT)
    rig.add("long", 50, max_tokens=200)
    assert 13 < peak(rig) <= 13 + LAST.tokens // BLOCK + 2


def test_others_find_a_prefix_that_was_given_back_until_its_blocks_are_used_again() -> None:
    rig = Rig(reach=LAST, num_blocks=60)
    rig.add("first", 81, max_tokens=30)
    rig.step()
    rig.step()
    assert used(rig) < 5
    rig.add("second", 81, max_tokens=2)
    rig.drain()
    assert rig.events["second"][-1].usage.cached_tokens == 80
    rig.add("other", 200, max_tokens=2, first_token=5_000)
    rig.drain()
    rig.add("third", 81, max_tokens=2)
    rig.drain()
    assert rig.events["third"][-1].usage.cached_tokens < 80


@pytest.mark.parametrize("caches", [True, False])
def test_more_requests_run_at_once_and_none_gives_way(caches: bool) -> None:
    """Eight answers of 200 tokens need 400 blocks."""
    for reach, gives_way in ((None, True), (LAST, False)):
        rig = Rig(reach=reach, num_blocks=60, enable_prefix_caching=caches)
        for number in range(8):
            rig.add(f"r{number}", 10, max_tokens=200, first_token=1_000 * number)
        rig.drain()
        assert bool(rig.scheduler.stats()["preemptions"]) is gives_way


@settings(max_examples=100, deadline=None)
@given(CONFIGS, st.lists(REQUESTS, min_size=1, max_size=8), st.sampled_from([LAST, BESIDE_PROMPT, AttentionReach(1)]))
def test_a_request_gets_the_same_tokens_with_its_blocks_given_back(
    config: dict, requests: list, reach: AttentionReach
) -> None:
    """What windows read is compared with their own records in every step."""
    told = []
    for one in (None, reach):
        rig = Rig(broken=["broken"], **{**config, "reach": one})
        accepted = drive(rig, requests)
        assert_nothing_is_held(rig)
        told.append({name: rig.tokens_of(name) for name in accepted if rig.finish_of(name) in ("length", "stop")})
    both = told[0].keys() & told[1].keys()
    assert all(told[0][name] == told[1][name] for name in both)
