"""Waiting for a stream's events: without a process, with the event loop's own timers."""

from __future__ import annotations

import asyncio

from saccade.engine.ipc.stream import News
from tests.helpers.fakes.fake_stream import running


def test_a_wait_ends_when_something_is_told_before_it_or_during_it() -> None:
    async def check() -> None:
        news = News()
        news.tell()
        assert await news.wait(60)
        asyncio.get_running_loop().call_soon(news.tell)
        assert await news.wait(60)

    running(check)


def test_a_shorter_wait_ends_in_time_though_the_timer_of_a_longer_one_is_set() -> None:
    async def check() -> None:
        news = News()
        asyncio.get_running_loop().call_soon(news.tell)
        assert await news.wait(3600)
        assert not await news.wait(0.01)
        assert not await news.wait(0.01)

    running(check)


def test_the_timer_of_an_earlier_wait_ends_no_later_one() -> None:
    async def check() -> None:
        news = News()
        loop = asyncio.get_running_loop()
        for seconds in (3600, None):
            loop.call_soon(news.tell)
            assert await news.wait(0.01)  # leaves its timer behind
            loop.call_later(0.05, news.tell)
            assert await news.wait(seconds)

    running(check)
