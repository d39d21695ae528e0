"""Tenants share the engine by their weights: simulations without a model, against first come, first served."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saccade.errors import RequestError
from saccade.scheduler import fair_queue
from saccade.scheduler.fair_queue import MAX_IDLE
from saccade.scheduler.tenant_share import (
    DECODED_PIXEL_COST,
    EMBEDDING_COST,
    MAX_LABELS,
    OUTPUT_COST,
    Rank,
)
from saccade.types.request import OTHER_LABEL, Tenant
from saccade.types.step import StepPlan
from tests.helpers.engine.async_scheduling import AheadRig
from tests.helpers.engine.random_workloads import BROKEN, CONFIGS, IMAGES, REQUESTS, assert_nothing_is_held, drive
from tests.helpers.engine.scheduling import FakeImage, Part, Rig, key_of, steps_to_first_token, unchecked

A, B, C = Tenant("A"), Tenant("B"), Tenant("C")
WEIGHTS = (Tenant("one", 1.0), Tenant("two", 2.0), Tenant("four", 4.0))
TENANTS = st.sampled_from([A, B, Tenant("heavy", 8.0), Tenant("light", 0.25)])


def services(rig: Rig) -> dict[str, float]:
    return {name: tenant["service"] for name, tenant in rig.scheduler.stats()["tenants"].items()}


def fair_and_fifo(run: Callable[[Tenant, Tenant], int]) -> tuple[int, int]:
    """What a run gives with two tenants, and where both are one: that is first come, first served."""
    return run(A, B), run(A, A)


# --- proportional service ---------------------------------------------------------------------------------------------


def prompt_of(kind: str, number: int, rng: random.Random) -> tuple[list[Part], int]:
    text: list[Part] = [[rng.randrange(10**6) for _ in range(rng.randint(10, 60))]]
    if kind == "images":
        return [*text, FakeImage(f"p{number}", rng.randint(8, 40)), 2], 2
    return text, 60 if kind == "outputs" else 3


@pytest.mark.parametrize("sliced", [None, 2])
@pytest.mark.parametrize("kind", ["prompts", "outputs", "images"])
def test_backlogged_tenants_get_service_by_their_weights(kind: str, sliced: int | None) -> None:
    rng = random.Random(3)
    rig = unchecked(
        max_num_batched_tokens=64, encoder_budget=40, encoder_cache_slots=160, encode_layers_per_step=sliced
    )
    numbers = itertools.count()
    for _ in range(300):
        for tenant in WEIGHTS:
            while rig.scheduler._queue.waiting_of(tenant) < 10:
                number = next(numbers)
                parts, max_tokens = prompt_of(kind, number, rng)
                rig.add(f"r{number}", *parts, max_tokens=max_tokens, tenant=tenant)
        rig.step()
    received = services(rig)
    assert sum(received.values()) > 4_000
    by_weight = [received[tenant.name] / tenant.weight for tenant in WEIGHTS]
    assert max(by_weight) < 1.1 * min(by_weight), received


def test_what_a_tenant_leaves_the_others_use_and_no_step_has_tokens_left() -> None:
    rig = Rig(max_num_batched_tokens=32, max_num_seqs=6)
    rng = random.Random(1)
    for number in range(60):
        tenant = (Tenant("light", 0.1), Tenant("heavy", 10.0))[number % 10 == 0]
        rig.add(f"r{number}", [rng.randrange(10**6) for _ in range(rng.randint(5, 80))], max_tokens=5, tenant=tenant)
    while rig.scheduler.has_unfinished():
        plan = rig.step()
        tokens = sum(window.end - window.start for window in plan.windows)
        stats = rig.scheduler.stats()
        assert tokens == 32 or not stats["waiting"] or len(plan.windows) == 6
    assert services(rig)["light"] > services(rig)["heavy"], "it had ten times less to do and left the rest"


def test_idle_time_is_not_saved_up() -> None:
    rig = unchecked(max_num_batched_tokens=40)
    rig.add("early", 4, max_tokens=1, tenant=B)
    for number in range(600):
        rig.add(f"a{number}", [number, 1, 2] * 10, max_tokens=2, tenant=A)
    for _ in range(200):
        rig.step()
    before = services(rig)
    for number in range(400):
        rig.add(f"b{number}", [number, 5, 6] * 10, max_tokens=2, tenant=B)
    for _ in range(100):
        rig.step()
    gained = {name: service - before[name] for name, service in services(rig).items()}
    assert gained["A"] == pytest.approx(gained["B"], rel=0.1)


def test_a_tenant_with_a_hundredth_of_the_weight_is_served_too() -> None:
    rig = Rig(max_num_batched_tokens=20, max_num_seqs=4)
    for number in range(200):
        rig.add(f"a{number}", [number, 1] * 10, max_tokens=5, tenant=Tenant("heavy", 100.0))
    rig.step()
    rig.add("b", [9] * 30, max_tokens=3, tenant=Tenant("light"))
    assert steps_to_first_token(rig, "b") < 40


def test_cached_prompts_and_images_cost_nothing() -> None:
    rig = Rig()
    rig.add("first", 8, FakeImage("cat", 8), 8, max_tokens=1, tenant=A)
    rig.drain()
    assert services(rig) == {"A": 24 + 8 * EMBEDDING_COST + 8 * DECODED_PIXEL_COST + OUTPUT_COST}
    rig.add("again", 8, FakeImage("cat", 8), 8, max_tokens=1, salt=b"", tenant=B)
    rig.drain()
    assert services(rig)["B"] == 4 + OUTPUT_COST, "its last block alone is computed"


# --- one tenant's flood beside another's request ----------------------------------------------------------------------


@pytest.mark.parametrize("sliced", [None, 1])
@pytest.mark.parametrize("in_one_request", [True, False])
@pytest.mark.parametrize("parts", [[[7] * 12], [[7] * 4, FakeImage("b", 8), 2]], ids=["text", "image"])
def test_a_flood_of_images_delays_no_request_of_another_tenant(
    parts: list[Part], in_one_request: bool, sliced: int | None
) -> None:
    def run(flooding: Tenant, other: Tenant) -> int:
        rig = unchecked(
            max_num_batched_tokens=48, encoder_budget=32, encoder_cache_slots=96, encode_layers_per_step=sliced
        )  # fmt: skip
        images = [FakeImage(f"p{number}", 8) for number in range(250)]
        if in_one_request:
            rig.add("a", *images, 2, tenant=flooding)
        else:
            for number, image in enumerate(images):
                rig.add(f"a{number}", 2, image, 2, tenant=flooding)
        for _ in range(4):
            rig.step()
        rig.add("b", *parts, tenant=other)
        return steps_to_first_token(rig, "b")

    fair, fifo = fair_and_fifo(run)
    assert fair <= 16
    if not (in_one_request and len(parts) == 1):  # text passes a single prompt that waits for the encoder
        assert fifo > 5 * fair


def images_beside_text(layers: int) -> dict[str, float]:
    """Service of A, which sends images, and of B, which sends text, after 300 steps that keep to a time."""
    rig = unchecked(
        layers=layers,
        is_bounded=True,
        max_num_batched_tokens=64,
        encode_layers_per_step=2,
        encoder_budget=80,
        encoder_cache_slots=320,
    )
    numbers = itertools.count()
    for _ in range(300):
        while rig.scheduler._queue.waiting_of(A) < 10:
            rig.add(f"a{next(numbers)}", 2, FakeImage(f"p{next(numbers)}", 40), 2, max_tokens=2, tenant=A)
        while rig.scheduler._queue.waiting_of(B) < 10:
            rig.add(f"b{next(numbers)}", [next(numbers)] * 40, max_tokens=2, tenant=B)
        rig.step()
    return services(rig)


def test_in_steps_that_keep_to_a_time_a_flood_of_text_does_not_come_before_anothers_images() -> None:
    """Of one tenant's prompts text goes first. Between tenants their shares decide."""
    received = images_beside_text(layers=4)
    assert received["A"] == pytest.approx(received["B"], rel=0.1)
    assert received["A"] > 10_000, "3,300 where all text goes before all images"


def test_what_a_tenant_leaves_that_waits_for_the_encoder_anothers_text_uses() -> None:
    """Its requests may take no more than its share of the seats while they can only wait."""
    received = images_beside_text(layers=100)
    assert received["B"] > 15_000, "about 200 where they sit in seven of eight seats"
    assert received["A"] > 300


def test_a_long_prompt_in_chunks_does_not_take_every_step() -> None:
    def run(flooding: Tenant, other: Tenant) -> int:
        rig = unchecked(num_blocks=1_100, max_num_batched_tokens=50)
        rig.add("long", 4_000, tenant=flooding)
        rig.step()
        rig.add("short", [5] * 20, tenant=other)
        return steps_to_first_token(rig, "short")

    fair, fifo = fair_and_fifo(run)
    assert (fair, fifo) == (1, 80)


@pytest.mark.parametrize("kind", [Rig, AheadRig])
def test_long_answers_in_all_seats_give_one_to_another_tenant(kind: type[Rig]) -> None:
    def run(flooding: Tenant, other: Tenant) -> int:
        rig = unchecked(kind, max_num_seqs=4)
        for number in range(12):
            rig.add(f"a{number}", [number] * 10, max_tokens=150, temperature=0, tenant=flooding)
        rig.step()
        rig.add("b", [99] * 10, max_tokens=3, temperature=0, tenant=other)
        steps = steps_to_first_token(rig, "b")
        rig.drain()
        return steps

    fair, fifo = fair_and_fifo(run)
    assert fair < 12
    assert fifo > 280


def test_seats_are_taken_back_no_oftener_than_the_difference_in_service_pays_for() -> None:
    rig = unchecked(max_num_seqs=4, enable_prefix_caching=False)
    for number in range(8):
        rig.add(f"a{number}", [number] * 40, max_tokens=200, tenant=A)
    for number in range(200):
        if number % 5 == 0:
            rig.add(f"b{number}", [99, number] * 5, max_tokens=3, tenant=B)
        rig.step()
    computed_for_a = sum(
        window.end - window.start for plan in rig.plans for window in plan.prefill if window.request_id[0] == "a"
    )
    lost = computed_for_a - 8 * 40
    assert rig.scheduler.stats()["preemptions"] > 0
    assert lost < services(rig)["A"] / 2
    rig.drain()


def test_when_blocks_run_out_the_tenant_above_its_share_gives_way() -> None:
    rig = Rig(num_blocks=60, max_num_seqs=8, enable_prefix_caching=False)
    for number in range(6):
        rig.add(f"a{number}", [number] * 20, max_tokens=60, tenant=A)
    rig.step()
    rig.step()
    rig.add("b", [99] * 20, max_tokens=60, tenant=B)  # the last to come
    rig.drain()
    preempted = {name: events[-1].usage.num_preemptions for name, events in rig.events.items()}
    assert preempted.pop("b") == 0
    assert sum(preempted.values()) > 0


def test_a_tenant_cannot_fill_the_queue_for_others() -> None:
    rig = Rig(max_waiting=4, max_num_seqs=1)
    rig.add("running", 3, max_tokens=50, tenant=A)
    rig.step()
    for number in range(4):
        rig.add(f"a{number}", 3, tenant=A)
    with pytest.raises(RequestError, match="4 requests are waiting and 4 may; try again"):
        rig.add("a4", 3, tenant=A)
    rig.add("b0", 3, tenant=B)
    rig.add("b1", 3, tenant=B)
    with pytest.raises(RequestError, match="6 requests are waiting and 4 may; 2 of them are yours"):
        rig.add("b2", 3, tenant=B)
    rig.drain()
    assert set(rig.events) == {"running", "a0", "a1", "a2", "a3", "b0", "b1"}


# --- priority ---------------------------------------------------------------------------------------------------------


def test_priority_orders_the_requests_of_a_tenant_and_arrival_those_of_one_priority() -> None:
    rig = Rig(max_num_seqs=1)
    for name, priority in (("late", 5), ("middle", 0), ("first", -3), ("second", -3)):
        rig.add(name, [len(name)] * 6, max_tokens=2, priority=priority)
    rig.drain()
    assert list(rig.events) == ["first", "second", "middle", "late"]


def test_priority_gains_nothing_over_other_tenants() -> None:
    rig = Rig(max_num_seqs=1)
    for number in range(6):
        rig.add(f"a{number}", [number] * 6, max_tokens=2, tenant=A, priority=-(10**9))
        rig.add(f"b{number}", [10 + number] * 6, max_tokens=2, tenant=B, priority=10**9)
    rig.drain()
    assert [name[0] for name in rig.events] == ["a", "b"] * 6


def test_when_blocks_run_out_a_request_of_lower_priority_gives_way() -> None:
    rig = Rig(num_blocks=20, enable_prefix_caching=False)
    rig.add("unhurried", [1] * 20, max_tokens=30, priority=1)
    rig.add("other", [2] * 20, max_tokens=30, priority=1)
    rig.step()
    rig.add("urgent", [3] * 20, max_tokens=30)
    rig.drain()
    preempted = {name: events[-1].usage.num_preemptions for name, events in rig.events.items()}
    assert preempted["urgent"] == 0
    assert preempted["other"] > 0


# --- laws -------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CONFIGS, st.lists(REQUESTS, min_size=1, max_size=10), st.randoms())
def test_with_one_tenant_the_counter_has_no_say(config: dict, requests: list, rng: random.Random) -> None:
    """Whatever it is, plans are the same: first come, first served."""
    rigs = [Rig(broken=["broken"], **config) for _ in range(2)]
    join = rigs[1].scheduler._queue.join

    def at_random(tenant: Tenant) -> object:
        share = join(tenant)
        share.counter += 1e6 * rng.random()
        return share

    rigs[1].scheduler._queue.join = at_random
    for rig in rigs:
        drive(rig, requests, [(C, 0)] * len(requests))
    fifo, random_counter = ([shown(plan) for plan in rig.plans] for rig in rigs)
    assert fifo == random_counter


def shown(plan: StepPlan) -> tuple[object, ...]:
    media = ([item.key for item in items] for items in (plan.encode, plan.prefetch))
    return (plan.windows, *media, plan.encode_layers, plan.evicted, plan.freed_requests)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    CONFIGS,
    st.lists(REQUESTS, min_size=1, max_size=12),
    st.lists(st.tuples(TENANTS, st.integers(-1, 1)), min_size=12, max_size=12),
)
def test_whatever_tenants_send_all_ends_once_and_service_is_what_was_computed(
    config: dict, requests: list, senders: list
) -> None:
    rig = Rig(broken=["broken"], **config)
    accepted = drive(rig, requests, senders)
    endings = {name: [event for event in rig.events[name] if event.finish_reason] for name in accepted}
    assert all(len(ends) == 1 for ends in endings.values())
    assert_nothing_is_held(rig)
    prefilled = sum(window.end - window.start for plan in rig.plans for window in plan.prefill)
    costs = {key_of(image.name, salt): cost_of(image) for image in (*IMAGES, BROKEN) for salt in (b"", b"other")}
    images = [item for plan in rig.plans for item in plan.encode]
    encoded = sum(costs[item.key] * EMBEDDING_COST + item.price * DECODED_PIXEL_COST for item in images)
    sampled = sum(event.token_id is not None for events in rig.events.values() for event in events)
    received = sum(services(rig).values())
    assert received == pytest.approx(prefilled + encoded + OUTPUT_COST * sampled)


def cost_of(image: FakeImage) -> int:
    return image.made or image.slots or image.tokens


@pytest.mark.parametrize("sliced", [None, 1])
@pytest.mark.parametrize("seed", range(2))
def test_long_streams_of_three_tenants_through_tiny_caches_drain(seed: int, sliced: int | None) -> None:
    rng = random.Random(seed)
    rig = Rig(
        max_num_batched_tokens=16,
        max_num_seqs=5,
        num_blocks=20,
        encoder_budget=12,
        encoder_cache_slots=rng.choice([12, 18, 30]),
        encode_layers_per_step=sliced,
    )
    for number in range(80):
        image = FakeImage(f"p{rng.randrange(30)}", rng.randint(1, 12))
        parts = [rng.choice([rng.randint(1, 8), image]) for _ in range(rng.randint(1, 4))]
        whose = {"tenant": rng.choice(WEIGHTS), "priority": rng.randint(-1, 1)}
        rig.add(f"r{number}", *parts, max_tokens=rng.randint(1, 30), **whose)
        if rng.random() < 0.7:
            rig.step()
    rig.drain(5_000)
    assert rig.scheduler.stats()["preemptions"] > 0
    rig.step()
    assert_nothing_is_held(rig)


def test_tenants_do_not_evict_what_is_encoded_ahead_for_each_other() -> None:
    rig = Rig(max_num_seqs=4, encode_layers_per_step=4, encoder_cache_slots=24, encoder_budget=16)
    for number, tenant in itertools.product(range(2), (A, B)):
        rig.add(f"{tenant.name}{number}", [number, 7], max_tokens=60, tenant=tenant)
    rig.step()
    for number, tenant in itertools.product(range(12), (A, B)):
        image = FakeImage(f"{tenant.name}{number}", 8)
        rig.add(f"{tenant.name}i{number}", [number], image, 2, max_tokens=2, tenant=tenant)
    rig.drain()
    assert len(rig.runner.encoded) <= 30, "of 24 images; over a hundred where each evicts the other's"


def test_tenants_that_left_are_forgotten_after_many_others() -> None:
    rig = unchecked()
    for number in range(MAX_IDLE + 20):
        rig.add("r", 3, max_tokens=1, tenant=Tenant(str(number)))
        rig.drain()
    assert len(rig.scheduler._queue._idle) == MAX_IDLE


def test_a_step_puts_its_tenants_in_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it asks which goes next: with many tenants that would cost as much as all the rest."""
    rig = unchecked(max_num_seqs=4, encode_layers_per_step=1)
    for number in range(200):
        rig.add(f"r{number}", [number] * 4, FakeImage(f"p{number}", 4), max_tokens=9, tenant=Tenant(str(number % 50)))
    rank = fair_queue._rank
    num_asked = 0

    def counting(queue: Any) -> Rank:
        nonlocal num_asked
        num_asked += 1
        return rank(queue)

    monkeypatch.setattr(fair_queue, "_rank", counting)
    for _ in range(10):
        num_asked = 0
        rig.step()
        assert num_asked <= 50 + 4, "tenants, and those with a seat"


@pytest.mark.parametrize("label", ["", OTHER_LABEL])
def test_no_counter_of_a_label_falls_however_many_tenants_come_and_go(label: str) -> None:
    """They share one, or there are more labels than counters."""
    rig = unchecked()
    before: dict[str, float] = {}
    for number in range(MAX_IDLE + 20):
        rig.add("r", 3, max_tokens=1, tenant=Tenant(str(number), label=label))
        rig.drain()
        now = services(rig)
        assert all(now[name] >= service for name, service in before.items()), "a counter fell"
        assert sum(now.values()) == pytest.approx((number + 1) * (3 + OUTPUT_COST))
        before = now
    assert len(before) == (1 if label else MAX_LABELS + 1)
    assert before[OTHER_LABEL] > MAX_LABELS


def test_a_tenant_with_a_new_label_takes_nothing_from_the_counter_of_the_old_one() -> None:
    rig = Rig()
    for label in ("other", "acme"):
        rig.add("r", [len(label)] * 3, max_tokens=1, tenant=Tenant("a", label=label))
        rig.drain()
    assert services(rig) == {"other": 3 + OUTPUT_COST, "acme": 3 + OUTPUT_COST}
