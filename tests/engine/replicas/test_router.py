"""Routing: cached prefixes and images against queued work. No process, no clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engine.replicas import router as routing
from saccade.engine.replicas.router import LOAD_FACTOR, LOAD_SLACK, RoutedCall, Router, demand_of
from saccade.sampling_params import Pooling
from saccade.scheduler.block_hashes import BlockHashes
from saccade.scheduler.cache_log import CacheChanges, entry_of
from tests.helpers.engine.random_workloads import PARTS
from tests.helpers.engine.scheduling import BLOCK, FakeImage, Part, Rig, key_of, make_config, make_request

LIMITS = make_config()
PHOTO = FakeImage("photo", 400)


class Routed:
    """A router of some replicas, all alive, and what it was given."""

    def __init__(self, count: int = 2) -> None:
        self.router = Router(count)
        self.live = list(range(count))
        self.placements: list[RoutedCall] = []

    def route(self, *parts: Part, **how: Any) -> RoutedCall:
        requests = [make_request("a", *parts, **how)]
        placement = self.router.place(demand_of(requests, LIMITS), self.live)
        self.placements.append(placement)
        self.router.check(self.placements)
        return placement

    def finish(self, placement: RoutedCall, *, publish: bool = True) -> None:
        if publish:
            self.router.replicas[placement.replica].apply(CacheChanges(False, placement.entries, ()))
        self.router.remove(placement)
        self.placements.remove(placement)
        self.router.check(self.placements)


# --- identity -----------------------------------------------------------------------------------------------------


def test_the_entries_of_a_prompt_are_those_that_the_scheduler_publishes() -> None:
    rig = Rig()
    log = rig.scheduler.log_caches()
    rig.add("a", 30, FakeImage("p", 21), 7, max_tokens=1)
    rig.drain()
    rig.scheduler.index()
    changes = log.take()
    assert changes is not None
    (prompt,) = demand_of([make_request("a", 30, FakeImage("p", 21), 7)], rig.config).prompts
    assert set(prompt.entries) == set(changes.added)


def test_another_salt_has_other_entries() -> None:
    entries = [set(demand_of([make_request("a", 40, salt=salt)], LIMITS).prompts[0].entries) for salt in (b"", b"x")]
    assert entries[0] and not entries[0] & entries[1]


def test_a_request_that_computes_its_whole_prompt_looks_for_images_and_no_blocks() -> None:
    request = make_request("a", 40, FakeImage("p", 21), pooling=Pooling(every_token=True))
    (prompt,) = demand_of([request], LIMITS).prompts
    assert not prompt.blocks and prompt.entries == (entry_of(key_of("p")),)


def test_a_long_prompt_is_hashed_only_at_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_MAX_BLOCKS", 3)
    (prompt,) = demand_of([make_request("a", 1000)], LIMITS).prompts
    request = make_request("a", 1000).prompt
    hashes = BlockHashes(request.identity, request.salt, BLOCK, ())
    assert prompt.blocks == tuple(entry_of(hashes.digest(index)) for index in range(3))


def test_without_a_prefix_cache_only_images_are_known() -> None:
    limits = make_config(enable_prefix_caching=False)
    (prompt,) = demand_of([make_request("a", 40, FakeImage("p", 8))], limits).prompts
    assert prompt.entries == (entry_of(key_of("p")),)


# --- choices ------------------------------------------------------------------------------------------------------


def test_equal_replicas_take_turns() -> None:
    routed = Routed(3)
    chosen = []
    for number in range(6):
        placement = routed.route([number] * 8)
        chosen.append(placement.replica)
        routed.finish(placement, publish=False)
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_new_prompts_go_to_the_replica_with_the_shortest_queue() -> None:
    routed = Routed(3)
    assert [routed.route([number] * 50).replica for number in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_known_image_is_worth_the_wait() -> None:
    routed = Routed()
    first = routed.route(8, PHOTO, 5)
    routed.finish(first)
    busy = routed.route([1] * 100)
    assert busy.replica != first.replica
    other = routed.route([2] * 90)
    assert other.replica == first.replica
    assert routed.route(8, PHOTO, [7] * 5).replica == first.replica


def test_an_image_is_found_behind_another_text() -> None:
    routed = Routed()
    first = routed.route(8, PHOTO)
    routed.finish(first)
    routed.finish(routed.route([5] * 20))
    routed.finish(routed.route([6] * 20))
    assert routed.route([3] * 8, PHOTO).replica == first.replica


def test_a_burst_with_one_image_goes_to_one_replica() -> None:
    routed = Routed(4)
    assert {routed.route(8, PHOTO, [n] * 5, max_tokens=8).replica for n in range(10)} == {0}


def test_a_burst_that_never_ends_spreads() -> None:
    routed = Routed(4)
    for number in range(150):
        routed.route(8, PHOTO, [number] * 300, max_tokens=100)
    loads = [replica.queued_work for replica in routed.router.replicas]
    assert max(loads) <= LOAD_FACTOR * sum(loads) / 4 + LOAD_SLACK + 1000


def test_what_was_evicted_is_not_known() -> None:
    routed = Routed()
    first = routed.route(8, PHOTO)
    routed.finish(first)
    routed.router.replicas[first.replica].apply(CacheChanges(False, (), first.entries))
    assert routed.route(8, PHOTO).prefill == first.prefill


@pytest.mark.parametrize("reset", [CacheChanges(True, (), ()), None])
def test_after_a_reset_or_a_restart_nothing_is_known(reset: CacheChanges | None) -> None:
    routed = Routed()
    first = routed.route(8, PHOTO)
    routed.finish(first)
    state = routed.router.replicas[first.replica]
    state.apply(reset) if reset else state.forget()
    assert not any(state.knows(entry) for entry in first.entries)


def test_a_request_that_ends_early_leaves_no_expectation() -> None:
    routed = Routed()
    first = routed.route(8, PHOTO)
    routed.finish(first, publish=False)
    state = routed.router.replicas[first.replica]
    assert not any(state.knows(entry) for entry in first.entries)
    assert state.queued_work == 0


def test_what_is_known_of_a_replica_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_ENTRIES", 10)
    state = Routed().router.replicas[0]
    for number in range(100):
        state.apply(CacheChanges(False, (number.to_bytes(8),), ()))
    assert [state.knows(number.to_bytes(8)) for number in (0, 89, 90, 99)] == [False, False, True, True]
    state.check([])


def test_a_full_replica_is_passed_over_while_another_is_not_full() -> None:
    router = Router(2)
    demand = demand_of([make_request("a", 8, PHOTO)], LIMITS)
    chosen = [router.place(demand, [0, 1], max_requests=2).replica for _ in range(5)]
    assert sorted(chosen[:4]) == [0, 0, 1, 1]
    assert chosen[4] in (0, 1)  # all are full: the engine itself refuses


# --- whatever happens -----------------------------------------------------------------------------------------------

ACTIONS = st.one_of(
    st.tuples(st.just("route"), st.lists(PARTS, min_size=1, max_size=4), st.sets(st.integers(0, 3), min_size=1)),
    st.tuples(st.sampled_from(["begin", "end", "publish", "evict", "restart"]), st.integers(0, 1000), st.just(set())),
)


def run(actions: list) -> list[int]:
    """The choices. Checks after each action that the load is bounded and nothing is miscounted."""
    router = Router(4)
    placements: list[RoutedCall] = []
    chosen = []
    for action, what, live in actions:
        if action == "route":
            loads = {index: router.replicas[index].queued_work for index in live}
            placement = router.place(demand_of([make_request("a", *what, max_tokens=900)], LIMITS), sorted(live))
            placements.append(placement)
            chosen.append(placement.replica)
            assert placement.replica in live
            assert loads[placement.replica] <= LOAD_FACTOR * sum(loads.values()) / len(loads) + LOAD_SLACK
        elif placements:
            placement = placements[what % len(placements)]
            state = router.replicas[placement.replica]
            if action == "begin":
                router.end_prefill(placement)
            elif action == "end":
                router.remove(placement)
                placements.remove(placement)
            elif action == "restart":
                state.forget()
            else:
                added, removed = (placement.entries, ()) if action == "publish" else ((), placement.entries)
                state.apply(CacheChanges(what % 5 == 0, added, removed))
        router.check(placements)
    for placement in placements:
        router.remove(placement)
    router.check([])
    return chosen


@settings(max_examples=100, deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_a_live_replica_is_chosen_within_the_bound_and_always_the_same(actions: list) -> None:
    assert run(actions) == run(actions)


def test_the_bound_holds_against_any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bound a replica that has everything cached would take nearly all."""
    monkeypatch.setattr(routing, "LOAD_SLACK", 0)
    routed = Routed(2)
    first = routed.route(8, FakeImage("huge", 9_000))
    routed.finish(first)
    replicas = [routed.route(8, FakeImage("huge", 9_000), [n] * 30, max_tokens=100).replica for n in range(8)]
    assert len(set(replicas)) == 2
