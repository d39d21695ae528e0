"""Turns of clients: what they make the server compute beside its event loop, and what it takes, by caller.

    bodies, prompts, templates, schemas, documents, plans ─► a fair pool each ─► seconds ─► the account

docs/design/security.md lists this work with its limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeVar

from saccade.helpers.process import thread_seconds
from saccade.options.server import ServerOptions
from saccade.processor.template_pool import THREADS as _TEMPLATE_THREADS
from saccade.server.accounts import Account
from saccade.server.errors import overloaded
from saccade.server.http.request_context import Caller
from saccade.server.metrics import Metrics
from saccade.util.fair_pool import FairPool, Owner, QueueFull

Result = TypeVar("Result")

BODY_THREADS = 2  # each waits for one process that checks bodies


class Work(Enum):
    """A kind of work."""

    BODY = "bodies"  # large ones and those of many values
    PROMPT = "prompts"  # fields, base64, hashes, tokens; text and numbers of answers
    TEMPLATE = "templates"
    SCHEMA = "schemas"
    DOCUMENT = "documents"
    PLAN = "plans"
    OWN = "own"  # the server's, for no client


class _Limits(NamedTuple):
    threads: int
    max_running: int  # threads that a client may hold
    max_waiting: int  # jobs of a client in the queue
    purpose: str  # what they wait for, in the 429
    option: str = ""  # that moves `waiting`


def _limits(server: ServerOptions, max_open: int) -> dict[Work, _Limits]:
    """`max_open`: requests of a client that the gate admits. Each has one job at a time."""
    schemas = _Limits(
        2, 1, server.max_schema_checks, "for their JSON schemas to be checked", " (--max-schema-checks)"
    )
    return {
        Work.BODY: _Limits(BODY_THREADS, 1, max_open, "for their bodies to be read"),
        Work.PROMPT: _Limits(4, 2, max_open, "to be tokenized"),
        Work.TEMPLATE: _Limits(_TEMPLATE_THREADS, 4, max_open, "for their chat template"),
        Work.SCHEMA: schemas,  # each thread waits for one process
        Work.DOCUMENT: _Limits(2, 1, max_open, "for their documents to be read"),  # here too
        Work.PLAN: _Limits(1, 1, 4, "for their plans"),
        Work.OWN: _Limits(2, 2, 64, ""),
    }


class Turns:
    def __init__(self, server: ServerOptions, max_open: int, metrics: Metrics) -> None:
        self._limits = _limits(server, max_open)
        self._pools = {
            work: FairPool(limits.threads, f"saccade-{work.value}", limits.max_waiting, limits.max_running)
            for work, limits in self._limits.items()
        }
        self._metrics = metrics

    def num_waiting(self, work: Work) -> int:
        return self._pools[work].num_waiting

    async def take(self, work: Work, caller: Caller, job: Callable[[], Result]) -> Result:
        """What the job returns. ApiError 429 if too many of the client's wait already.

        A job that has begun is charged with its helper processes, whether its client stays or leaves.
        """
        loop = asyncio.get_running_loop()
        jobs = [job]
        del job

        def measured() -> Result:
            start = thread_seconds()
            try:
                return jobs.pop()()
            finally:
                seconds = thread_seconds() - start
                with suppress(RuntimeError):  # the server has ended
                    loop.call_soon_threadsafe(self.charge, caller.account, seconds)

        owner = Owner(caller.client, caller.request_id, caller.account.settings.weight)
        try:
            return await asyncio.wrap_future(self._pools[work].submit(owner, measured))
        except asyncio.CancelledError:
            jobs.clear()  # what it holds, such as a body, must not stay until its turn comes
            raise
        except QueueFull as full:
            self._metrics.refused("overloaded")
            limits = self._limits[work]
            state = f"{full.count} of your requests wait {limits.purpose}"
            message = f"{state} and {limits.max_waiting} may{limits.option}; try again soon"
            raise overloaded(429, message) from None

    async def in_thread(self, caller: Caller, work: Callable[..., Result], *args: Any) -> Result:
        """Runs work of a millisecond or more: on the event loop it would delay the tokens of all streams."""
        return await self.take(Work.PROMPT, caller, partial(work, *args))

    async def take_own(self, job: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self._pools[Work.OWN].submit("", job))

    def charge(self, account: Account, seconds: float) -> None:
        """Processor seconds."""
        account.use_processor(seconds)
        self._metrics.tenants.worked(account.settings.label, seconds)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def check_idle(self) -> None:
        """The conservation law: no client has work here."""
        for pool in self._pools.values():
            pool.check_idle()
