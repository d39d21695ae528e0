"""Random workloads: whatever arrives, aborts or breaks, everything drains and nothing leaks."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saccade.errors import RequestError
from tests.helpers.engine.random_workloads import BROKEN, CONFIGS, IMAGES, REQUESTS, assert_nothing_is_held, drive
from tests.helpers.engine.scheduling import EOS, FakeImage, Part, Rig


@pytest.mark.slow
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CONFIGS, st.lists(REQUESTS, min_size=1, max_size=14))
def test_any_workload_drains_and_each_accepted_request_ends_once(config: dict, requests: list) -> None:
    rig = Rig(broken=["broken"], **config)
    accepted = drive(rig, requests)
    endings = {name: [e for e in rig.events[name] if e.finish_reason] for name in accepted}
    assert all(len(ends) == 1 and rig.events[name][-1] is ends[0] for name, ends in endings.items())
    assert_nothing_is_held(rig)


@settings(max_examples=100, deadline=None)
@given(CONFIGS, st.lists(REQUESTS, min_size=1, max_size=8), st.integers(1, 20))
def test_after_a_step_that_broke_the_engine_serves_new_requests(config: dict, requests: list, when: int) -> None:
    rig = Rig(broken=["broken"], **config)
    for number, (parts, *_rest) in enumerate(requests):
        if sum(part if isinstance(part, int) else 12 for part in parts) < 15:
            rig.add(f"r{number}", *parts, max_tokens=2)
    for _ in range(when):
        rig.step()
    rig.scheduler.schedule(rig.now)  # this plan is lost
    for event in rig.scheduler.fail_all(RequestError("the step broke"), rig.now):
        rig.take(event)
    rig.runner.reset()
    rig.scheduler.check()
    assert not rig.scheduler.has_unfinished()
    rig.add("after", 3, FakeImage("a", 3), 2)
    rig.drain()
    assert rig.finish_of("after") == "length"
    assert len(rig.runner.embeddings) <= 1, "embeddings from before were not dropped"


@pytest.mark.parametrize("sliced", [None, 1])
@pytest.mark.parametrize("seed", range(4))
def test_long_streams_of_images_through_tiny_caches_drain(seed: int, sliced: int | None) -> None:
    rng = random.Random(seed)
    rig = Rig(
        broken=["broken"],
        max_num_batched_tokens=16,
        max_num_seqs=5,
        num_blocks=20,
        encoder_budget=12,
        encoder_cache_slots=rng.choice([12, 18, 30]),
        encode_layers_per_step=sliced,
    )
    rig.runner.next_token = lambda _, position: EOS if rng.random() < 0.1 else 1_000 + position % 3
    for number in range(150):
        rig.add(f"r{number}", *_random_parts(rng), max_tokens=rng.randint(1, 30))
        if rng.random() < 0.7:
            rig.step()
        if rng.random() < 0.1:
            rig.take(rig.scheduler.abort(f"r{rng.randint(0, number)}", rig.now))
    rig.drain()
    rig.step()
    ends = Counter(name for name, events in rig.events.items() for event in events if event.finish_reason)
    assert ends == {f"r{number}": 1 for number in range(150)}
    assert rig.scheduler.stats()["preemptions"] > 0
    assert_nothing_is_held(rig)


def _random_parts(rng: random.Random) -> list[Part]:
    images = [*IMAGES, BROKEN] if rng.random() < 0.2 else IMAGES
    return [rng.choice([rng.randint(1, 8), rng.choice(images)]) for _ in range(rng.randint(1, 4))]


@pytest.mark.slow
@pytest.mark.parametrize("sliced", [None, 2])
def test_a_zipf_stream_of_images_takes_the_hit_rate_from_nothing_to_over_four_fifths(sliced: int | None) -> None:
    rng = random.Random(7)
    rig = Rig(encoder_budget=64, encoder_cache_slots=400, enable_prefix_caching=False, encode_layers_per_step=sliced)
    weights = [1 / rank**1.2 for rank in range(1, 201)]
    rates = []
    for wave in range(12):
        before = rig.scheduler.stats()["encoder_cache"]
        for number in range(60):
            image = rng.choices(range(200), weights)[0]
            rig.add(f"{wave}.{number}", 4, FakeImage(f"p{image}", 4), 2, max_tokens=3)
            rig.step()
        rig.drain()
        after = rig.scheduler.stats()["encoder_cache"]
        hits, misses = after["hits"] - before["hits"], after["misses"] - before["misses"]
        rates.append(hits / (hits + misses))
    assert before["slots_used"] <= 400
    assert rig.plans[0].encode, "the very first picture is a miss"
    assert rates[0] < rates[-1]
    assert rates[-1] > 0.8
