"""The policy of autoscaling: it grows and shrinks by load, one at a time, and never flaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.engine.autoscale import GROW_AFTER, HIGH_WORK, LOW_WORK, SHRINK_AFTER, Autoscaler, WorkerLoad


def decisions(scaler: Autoscaler, *loads: WorkerLoad) -> list[int]:
    return [scaler.decide(load) for load in loads]


def busy(count: int, starting: int = 0) -> WorkerLoad:
    return WorkerLoad(count, starting, HIGH_WORK * count + 1, 0.0)


def idle(count: int, starting: int = 0) -> WorkerLoad:
    return WorkerLoad(count, starting, 0, 0.0)


@pytest.mark.parametrize("load", [busy(2), WorkerLoad(2, 0, 0, 1.9)], ids=["queued work", "use"])
def test_high_load_grows_after_some_observations(load: WorkerLoad) -> None:
    assert decisions(Autoscaler(1, 4), *[load] * GROW_AFTER) == [0] * (GROW_AFTER - 1) + [1]


def test_a_pause_within_a_burst_starts_the_count_anew() -> None:
    assert not any(decisions(Autoscaler(1, 4), *[busy(2), busy(2), idle(2)] * 3))


def test_low_load_shrinks_after_many_observations() -> None:
    assert decisions(Autoscaler(1, 4), *[idle(2)] * SHRINK_AFTER) == [0] * (SHRINK_AFTER - 1) + [-1]


def test_the_rest_must_be_able_to_take_the_work() -> None:
    work = LOW_WORK * 2 - 1  # little for two, much for one
    assert not any(decisions(Autoscaler(1, 4), *[WorkerLoad(2, 0, work, 0.0)] * 100))
    assert not any(decisions(Autoscaler(1, 4), *[WorkerLoad(2, 0, 0, 0.6)] * 100))


def test_the_limits_hold() -> None:
    assert not any(decisions(Autoscaler(2, 2), *[busy(2)] * 100, *[idle(2)] * 100))


def test_one_start_at_a_time_counts_against_the_maximum() -> None:
    assert not any(decisions(Autoscaler(1, 4), *[busy(2, starting=1)] * 100))


def test_nothing_is_decided_while_no_worker_is_ready() -> None:
    assert not any(decisions(Autoscaler(0, 4), *[WorkerLoad(0, 0, HIGH_WORK, 0.0)] * 100))


@given(work=st.integers(0, 10 * HIGH_WORK), use=st.floats(0, 8), count=st.integers(1, 8))
def test_constant_load_is_followed_by_rest(work: int, use: float, count: int) -> None:
    """Growing never leads to a size that is shrunk again."""
    scaler = Autoscaler(1, 8)
    steps = []
    for _ in range(20 * SHRINK_AFTER):
        change = scaler.decide(WorkerLoad(count, 0, work, min(use, count)))
        count += change
        steps += [change] if change else []
    assert len(set(steps)) <= 1 and 1 <= count <= 8
