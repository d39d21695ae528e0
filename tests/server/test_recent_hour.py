"""The last hour: what counts, when it is forgotten, how exact its percentiles are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from saccade.server.recent_hour import RecentHour
from saccade.types.bill import Bill, BillItem
from saccade.types.media import Grid

IMAGE = BillItem("image", 640, 480, 644, 476, 391, 25, "abc", Grid(1, 34, 46))
BILL = Bill(10, 782, 0, 50, (IMAGE, IMAGE))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hour(clock: Clock) -> RecentHour:
    return RecentHour(clock)


def after(hour: RecentHour, clock: Clock, seconds: float) -> dict[str, Any]:
    clock.now += seconds
    return hour.summary()


def test_without_requests_there_are_no_times(hour: RecentHour, clock: Clock) -> None:
    found = after(hour, clock, 30)
    assert found["seconds"] == 30 and found["requests"] == 0 and found["max_requests_per_s"] == 0
    assert found["ttft_ms"] is None and found["itl_ms"] is None and found["per_request"] is None


def test_tokens_and_images_are_told_per_request(hour: RecentHour) -> None:
    hour.finished([BILL], 20)
    hour.finished([Bill(30, 0, 0, 2, ())], 40)
    per_request = {"text_tokens": 20, "image_tokens": 391, "images": 1, "videos": 0, "output_tokens": 30}
    assert hour.summary()["per_request"] == per_request


def test_a_video_is_no_image_and_its_tokens_count(hour: RecentHour) -> None:
    hour.finished([Bill(10, 0, 500, 40, (replace(IMAGE, kind="video"),))], 1)
    found = hour.summary()["per_request"]
    assert (found["images"], found["videos"], found["image_tokens"]) == (0, 1, 500)


def test_the_busiest_minute_is_told(hour: RecentHour, clock: Clock) -> None:
    for requests in (6, 30, 3):
        for _ in range(requests):
            hour.finished([BILL], 1)
        clock.now += 60
    assert hour.summary()["max_requests_per_s"] == 0.5 and hour.summary()["requests"] == 39


@pytest.mark.parametrize("seconds", [0.0005, 0.02, 0.3, 12.0])
def test_percentiles_are_within_a_tenth(hour: RecentHour, seconds: float) -> None:
    for i in range(100):
        hour.first_token(seconds * (1 + i / 100))
    found = hour.summary()["ttft_ms"]
    assert found["p50"] == pytest.approx(1500 * seconds, rel=0.1)
    assert found["p99"] == pytest.approx(1990 * seconds, rel=0.1)


def test_every_token_counts_between_tokens(hour: RecentHour) -> None:
    hour.next_tokens(0.01, 98)
    hour.next_tokens(1.0, 2)
    found = hour.summary()["itl_ms"]
    assert found["p50"] == pytest.approx(10, rel=0.1) and found["p99"] == pytest.approx(1000, rel=0.1)


def test_times_beyond_the_last_bound_are_that_bound(hour: RecentHour) -> None:
    hour.first_token(1e6)
    assert 600e3 < hour.summary()["ttft_ms"]["p50"] < 700e3


def test_what_is_older_than_an_hour_is_forgotten(hour: RecentHour, clock: Clock) -> None:
    hour.finished([BILL], 1)
    hour.first_token(0.1)
    assert after(hour, clock, 58 * 60)["requests"] == 1
    found = after(hour, clock, 2 * 60)
    assert found["requests"] == 0 and found["ttft_ms"] is None and found["seconds"] == 3600


def test_a_day_of_requests_takes_the_memory_of_an_hour(hour: RecentHour, clock: Clock) -> None:
    for _ in range(24 * 60):
        hour.finished([BILL], 1)
        clock.now += 60
    clock.now -= 60
    assert hour.summary()["requests"] == 60 == len(hour._minutes)
