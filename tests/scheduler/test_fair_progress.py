"""Tenants that try to stand in each other's way: everybody gets on, and soon."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest

from saccade.errors import RequestError
from saccade.types.request import Tenant
from tests.helpers.engine.async_scheduling import AheadRig
from tests.helpers.engine.scheduling import FakeImage, Rig, seen, steps_to_first_token, unchecked

A, B, C = Tenant("A"), Tenant("B"), Tenant("C")


def steps_to_end(rig: Rig, *names: str, limit: int = 100) -> int:
    for step in range(limit):
        if all(name in rig.events and rig.events[name][-1].finish_reason for name in names):
            return step
        rig.step()
    raise AssertionError(f"not done after {limit} steps")


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_two_tenants_that_pin_what_the_other_needs_both_end(enable_prefix_caching: bool) -> None:
    """B was served less, so it goes first again after it was preempted: A must keep what was freed for it."""
    rig = Rig(
        encoder_cache_slots=16,
        encoder_budget=8,
        num_blocks=400,
        max_num_seqs=16,
        enable_prefix_caching=enable_prefix_caching,
    )
    for number in range(8):
        rig.add(f"text-{number}", [5, number] * 2, max_tokens=200, tenant=A)
    rig.add("a", [1] * 3, seen("p"), seen("q"), 3, max_tokens=2, tenant=A)
    rig.step()
    rig.add("b", [2] * 3, seen("r"), seen("s"), 3, max_tokens=2, tenant=B)
    assert steps_to_end(rig, "a", "b") <= 20


def test_a_deadlock_of_images_ends_beside_decodes_that_are_launched_ahead() -> None:
    rig = unchecked(AheadRig, encoder_cache_slots=18, encoder_budget=12, max_num_seqs=8, num_blocks=400)
    rig.add("text", [5] * 4, max_tokens=300, temperature=0)
    for _ in range(4):
        rig.step()
    rig.add("one", seen("p"), seen("q"), 3, max_tokens=2, temperature=0)
    rig.add("other", seen("r", 4), seen("s"), 3, max_tokens=2, temperature=0)
    assert steps_to_end(rig, "one", "other") <= 20


@pytest.mark.parametrize("priority", [0, 9])
def test_no_priority_saves_a_tenant_from_giving_a_seat_back(priority: int) -> None:
    rig = unchecked(max_num_seqs=4)
    rig.add("a0", [0] * 10, max_tokens=600, tenant=A, priority=priority)
    rig.step()
    for number in range(1, 12):
        rig.add(f"a{number}", [number] * 10, max_tokens=300, tenant=A)
    for _ in range(20):
        rig.step()
    rig.add("b", [99] * 10, max_tokens=3, tenant=B)
    assert steps_to_first_token(rig, "b") <= 5


@pytest.mark.parametrize("is_bounded", [False, True])
def test_requests_that_wait_for_the_encoder_keep_no_seat_from_anothers_text(is_bounded: bool) -> None:
    """Their images are large and many steps away, and a few tokens are all that a preemption costs."""
    rig = unchecked(
        layers=60,
        max_num_seqs=4,
        encode_layers_per_step=1,
        encoder_budget=400,
        encoder_cache_slots=1200,
        is_bounded=is_bounded,
    )
    for number in range(8):
        rig.add(f"a{number}", [number] * 4, FakeImage(f"image-{number}", 300), 2, max_tokens=2, tenant=A)
    for _ in range(3):
        rig.step()
    assert rig.scheduler.stats()["running"] == 4
    for number in range(3):
        rig.add(f"b{number}", [99, number] * 5, max_tokens=3, tenant=B)
        assert steps_to_first_token(rig, f"b{number}") <= 5
    rig.drain()
    again = sum(events[-1].usage.num_preemptions for name, events in rig.events.items() if name[0] == "a")
    computed = sum(window.end - window.start for plan in rig.plans for window in plan.prefill)
    assert again > 0 and computed <= 8 * 306 + 3 * 10 + 4 * again


def test_a_request_without_its_grammar_keeps_no_other_tenant_from_a_seat() -> None:
    rig = unchecked(max_num_seqs=4)
    for number in range(12):
        rig.add(f"a{number}", [number] * 10, max_tokens=300, tenant=A)
    rig.step()
    rig.add("c", [77] * 10, max_tokens=3, tenant=C)
    rig.not_ready = frozenset({"c"})
    rig.add("b", [99] * 10, max_tokens=3, tenant=B)
    assert steps_to_first_token(rig, "b") <= 5


def test_a_queue_of_images_has_no_unlimited_credit_against_a_newcomer() -> None:
    """A waits for the encoder while B's text is served: what A could not use, it may claim only in part."""
    rig = unchecked(
        max_num_batched_tokens=400, encoder_budget=8, encoder_cache_slots=96, num_blocks=2000, max_num_seqs=64
    )
    for number in range(200):
        rig.add(f"image-{number}", FakeImage(f"image-{number}", 8), 2, max_tokens=1, tenant=A)
    numbers = itertools.count()
    for step in range(150):
        while rig.scheduler._queue.waiting_of(B) < 20:
            number = next(numbers)
            rig.add(f"text-{number}", [number, 7] * 20, max_tokens=1, tenant=B)
        if step == 50:
            rig.add("new", FakeImage("new", 8), 2, max_tokens=1, tenant=C)
        rig.step()
        if "new" in rig.events:
            break
    assert step <= 80 and rig.scheduler._queue.waiting_of(A) > 50


def test_a_running_request_does_not_starve_while_images_of_waiting_ones_fill_a_tiny_cache() -> None:
    """Those wait for a seat. Whoever holds one needs the space to go on and to give it back."""
    rig = Rig(max_num_seqs=2, encode_layers_per_step=1, encoder_budget=16, encoder_cache_slots=16)
    rig.add("long", [5] * 4, max_tokens=300, tenant=C)
    rig.add("short", [6] * 4, max_tokens=12, tenant=C)
    rig.step()
    for number in range(2):
        rig.add(f"b{number}", FakeImage(f"b{number}", 8), 2, max_tokens=2, tenant=B)
    for _ in range(9):
        rig.step()
    assert rig.scheduler.stats()["encoder_cache"]["slots_idle"] == 16
    rig.add("a", [1] * 3, FakeImage("a", 16), 2, max_tokens=2, tenant=A)
    assert steps_to_end(rig, "short", "a", "b0", "b1") <= 40


def test_the_queue_is_never_longer_than_twice_its_limit() -> None:
    rig = unchecked(max_num_seqs=1, max_waiting=12)
    rig.add("runs", 3, max_tokens=500, tenant=Tenant("0"))
    rig.step()
    for tenant, number in itertools.product(range(12), range(30)):
        with suppress(RequestError):
            rig.add(f"{tenant}-{number}", 3, tenant=Tenant(str(tenant)))
    assert rig.scheduler.stats()["waiting"] == 24
