"""Clients take turns: what one may hold and let wait, and what its work is charged."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from saccade.helpers.process import HelperProcess
from saccade.options.server import ServerOptions
from saccade.server.accounts import Account, LimitExceeded
from saccade.server.errors import ApiError
from saccade.server.http.request_context import Caller
from saccade.server.metrics import Metrics
from saccade.server.request_record import RequestRecord
from saccade.server.tenant_file import TenantLimits, TenantSettings
from saccade.server.turns import Turns, Work
from tests.helpers.fakes.fake_stream import running


def caller(client: str, request_id: str = "r", seconds: int | None = None) -> Caller:
    settings = TenantSettings(limits=TenantLimits(processor_seconds_per_minute=seconds), label=client)
    return Caller(request_id, client, RequestRecord(), client, Account(client, settings))


class Gate:
    """Holds the jobs of a test until it is opened."""

    def __init__(self) -> None:
        self.is_open, self.order = threading.Event(), []  # type: tuple[threading.Event, list[str]]

    def job(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.order.append(name)
            assert self.is_open.wait(20)
            return name

        return work


@asynccontextmanager
async def turns(max_open: int = 100, metrics: Metrics | None = None) -> AsyncIterator[Turns]:
    """All of them are idle in the end."""
    made = Turns(ServerOptions(max_schema_checks=3), max_open, metrics or Metrics("m", dict))
    yield made
    made.check_idle()
    made.close()


async def settled(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


@pytest.mark.parametrize(("work", "share"), [(Work.BODY, 1), (Work.PROMPT, 2), (Work.TEMPLATE, 4), (Work.SCHEMA, 1)])
def test_a_client_leaves_threads_for_others(work: Work, share: int) -> None:
    async def check() -> None:
        gate = Gate()
        async with turns() as made:
            hogs = [
                asyncio.create_task(made.take(work, caller("ka", str(i)), gate.job("ka"))) for i in range(3 * share)
            ]
            await settled(lambda: len(gate.order) == share)
            other = asyncio.create_task(made.take(work, caller("kb"), gate.job("kb")))
            await settled(lambda: "kb" in gate.order)
            assert gate.order == ["ka"] * share + ["kb"], "it came last and did not wait"
            gate.is_open.set()
            assert await asyncio.gather(*hogs, other) == ["ka"] * 3 * share + ["kb"]

    running(check)


@pytest.mark.parametrize(
    ("work", "waiting", "says"),
    [
        (Work.BODY, 100, "bodies"),
        (Work.DOCUMENT, 100, "documents"),
        (Work.SCHEMA, 3, "--max-schema-checks"),
        (Work.PLAN, 4, "plans"),
    ],
)
def test_what_is_too_much_for_one_client_gets_429_with_the_limit(work: Work, waiting: int, says: str) -> None:
    async def check() -> None:
        gate, metrics = Gate(), Metrics("m", dict)
        async with turns(metrics=metrics) as made:
            first = asyncio.create_task(made.take(work, caller("ka"), gate.job("ka")))
            await settled(lambda: gate.order == ["ka"])
            others = [asyncio.create_task(made.take(work, caller("ka"), gate.job("ka"))) for _ in range(waiting)]
            await settled(lambda: made.num_waiting(work) == waiting)
            with pytest.raises(ApiError, match=f"{waiting} of your requests wait .*{waiting} may") as caught:
                await made.take(work, caller("ka"), gate.job("ka"))
            assert caught.value.status == 429 and caught.value.retry_after and says in caught.value.message
            assert 'saccade:admission_rejected_total{reason="overloaded"} 1.0' in metrics.text().decode()
            other = asyncio.create_task(made.take(work, caller("kb"), gate.job("kb")))
            gate.is_open.set()
            await asyncio.gather(first, other, *others)

    running(check)


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def fail() -> None:
    spin(0.05)
    raise ValueError


def test_what_work_took_is_charged_also_where_it_fails_or_its_client_leaves() -> None:
    async def check() -> None:
        acme, metrics = caller("acme", seconds=1), Metrics("m", dict)
        helper = HelperProcess("tests.helpers.servers.odd_helper")

        def used() -> float:
            return acme.account._buckets["processor-seconds"].used

        async with turns(metrics=metrics) as made:
            await made.take(Work.PROMPT, acme, lambda: spin(0.05))
            assert 0.04 < used() < 1, "charged before the caller goes on"
            with pytest.raises(ValueError):
                await made.take(Work.PROMPT, acme, fail)
            assert used() > 0.09
            has_begun = threading.Event()
            leaving = asyncio.create_task(made.take(Work.PROMPT, acme, lambda: (has_begun.set(), spin(0.1))))
            await settled(has_begun.is_set)
            leaving.cancel()
            await settled(lambda: used() > 0.18)
            before = used()
            await made.take(Work.BODY, acme, partial(helper.ask, [b"spin"], 0.3))
            assert used() - before > 0.2, "its process took that"
        assert "tenant_processor_seconds_total" in metrics.text().decode()
        helper.close()

    running(check)


def test_processor_seconds_that_are_used_up_refuse_the_next_request() -> None:
    acme = caller("acme", seconds=10).account
    acme.check_processor()
    acme.use_processor(25.0)
    with pytest.raises(LimitExceeded, match=r"25.0 processor seconds .*limit is 10 a minute") as caught:
        acme.check_processor()
    assert caught.value.status == 429 and 90 <= (caught.value.retry_after or 0) <= 97
    assert acme.headers()["x-ratelimit-remaining-processor-seconds"] == "0"
    caller("other").account.use_processor(1e9)  # without a limit nothing is kept
    caller("other").account.check_processor()


class Body:
    """What a job holds."""

    def read(self) -> None:
        raise AssertionError("its client has left")


def test_a_client_that_leaves_takes_what_waits_along() -> None:
    async def check() -> None:
        gate = Gate()
        async with turns() as made:
            first = asyncio.create_task(made.take(Work.BODY, caller("ka"), gate.job("ka")))
            await settled(lambda: gate.order == ["ka"])
            body = Body()
            kept = weakref.ref(body)
            waiting = asyncio.create_task(made.take(Work.BODY, caller("ka"), body.read))
            del body
            await settled(lambda: made.num_waiting(Work.BODY) == 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            del waiting
            gc.collect()
            assert kept() is None, "its bytes would count for nobody"
            gate.is_open.set()
            await first

    running(check)


def test_the_servers_own_work_waits_for_no_client() -> None:
    async def check() -> None:
        gate = Gate()
        async with turns() as made:
            works = [work for work in Work if work is not Work.OWN]
            clients = [caller(str(number)) for number in range(12)]
            jobs = [asyncio.create_task(made.take(work, one, gate.job("k"))) for work in works for one in clients]
            await asyncio.sleep(0)
            assert await made.take_own(lambda: "reloaded") == "reloaded"
            gate.is_open.set()
            await asyncio.gather(*jobs)

    running(check)
