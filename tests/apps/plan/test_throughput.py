from __future__ import annotations

import random
from dataclasses import replace

import pytest

from saccade.apps.plan.throughput import Level, RequestDemand, load_at, sustained

DEMAND = RequestDemand(
    encode=0.01,
    prefill=0.02,
    host=0.001,
    first=0.04,
    steps=100,
    decode=lambda running: 0.004 + 0.00002 * running,
    max_running=128,
    memory="KV cache",
)
PREFILL = replace(DEMAND, steps=0)


def test_requests_that_decode_are_as_many_as_arrive_in_the_time_of_an_answer() -> None:
    load = load_at(DEMAND, 10.0)
    assert load is not None
    assert load.running == pytest.approx(10.0 * DEMAND.steps * load.between, rel=1e-3)
    assert load.between == pytest.approx(DEMAND.decode(load.running) / (1 - 10.0 * DEMAND.work), rel=1e-3)


def test_the_wait_is_that_of_a_simulated_queue() -> None:
    """Poisson arrivals, equal services, one at a time."""
    dice = random.Random(0)
    for busy in (0.3, 0.7, 0.9):
        waits = []
        backlog = 0.0
        for _ in range(200_000):
            backlog = max(0.0, backlog - dice.expovariate(busy / PREFILL.work))
            waits.append(backlog)
            backlog += PREFILL.work
        load = load_at(PREFILL, busy / PREFILL.work)
        assert load is not None
        assert load.wait == pytest.approx(sum(waits) / len(waits), rel=0.1)
        assert load.wait_p99 == pytest.approx(sorted(waits)[int(0.99 * len(waits))], rel=0.1)


def test_beyond_what_is_sustained_there_is_no_load() -> None:
    rate, _ = sustained(DEMAND)
    assert load_at(DEMAND, 0.999 * rate) and not load_at(DEMAND, 1.001 * rate)


@pytest.mark.parametrize(
    ("demand", "level", "limit"),
    [
        (DEMAND, Level(), "prefill"),
        (replace(DEMAND, encode=0.05), Level(), "encode"),
        (replace(DEMAND, max_running=4), Level(), "KV cache"),
        (replace(DEMAND, steps=4000, decode=lambda running: 0.0001 * running), Level(), "decode"),
        (replace(DEMAND, host=0.1), Level(), "image decoding on the host"),
        (DEMAND, Level(first=0.1), "first-token service level"),
        (DEMAND, Level(between=0.006), "between-tokens service level"),
    ],
)
def test_what_limits_is_named(demand: RequestDemand, level: Level, limit: str) -> None:
    rate, found = sustained(demand, level)
    assert found == limit
    assert 0 < rate <= 1 / demand.work


def test_a_service_level_is_kept_at_the_rate_that_is_sustained() -> None:
    rate, _ = sustained(DEMAND, Level(first=0.2, between=0.01))
    load = load_at(DEMAND, rate)
    assert load is not None
    assert DEMAND.first + load.wait_p99 <= 0.2 and load.between <= 0.01


def test_a_first_token_that_is_late_on_an_idle_server_sustains_nothing() -> None:
    rate, limit = sustained(DEMAND, Level(first=0.03))
    assert rate == pytest.approx(0, abs=1e-6)
    assert limit == "first-token service level"
