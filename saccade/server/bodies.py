"""Bodies as checked JSON objects. Heavy ones are checked in a process: only what passes is decoded here."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from saccade.errors import RequestError
from saccade.helpers.process import HelperPool, HelperProcess, Outcome
from saccade.server.body_worker import SECONDS, Problem, packed
from saccade.server.errors import overloaded
from saccade.server.http.body_check import BodyLimits, check, decoded
from saccade.server.http.request_context import Exchange
from saccade.server.http.text_limit import TextTally
from saccade.server.turns import BODY_THREADS, Turns, Work

_SPARE_MB = 512
_COPIES = 4  # of a body, while it is decoded


class BodyReader:
    def __init__(self, turns: Turns, max_body_mb: int) -> None:
        self._turns = turns
        memory = str(_SPARE_MB + _COPIES * max_body_mb)
        helpers = [HelperProcess("saccade.server.body_worker", memory) for _ in range(BODY_THREADS)]
        self._helpers = HelperPool(helpers)

    async def read(self, exchange: Exchange) -> dict[str, Any]:
        """RequestError if it is no JSON object, or its text cannot fit the context."""
        tally = exchange.body.tally
        work = Work.BODY if tally.is_large else Work.PROMPT
        return await self._turns.take(work, exchange.caller, partial(self._read, exchange.body.take(), tally))

    def _read(self, data: bytes | bytearray, tally: TextTally) -> dict[str, Any]:
        if tally.is_heavy:
            self._check_apart(data, tally.limits)
        body = decoded(data)
        if not (tally.is_heavy or tally.is_checked):
            check(body, tally.limits)
        return body

    def _check_apart(self, data: bytes | bytearray, limits: BodyLimits) -> None:
        reply = self._helpers.use(lambda helper: helper.ask([packed(limits), data], SECONDS))
        if reply.outcome is Outcome.FAILED:
            problem = msgspec.json.decode(reply.body, type=Problem)
            raise RequestError(problem.message, code=problem.code, param=problem.param)
        if reply.outcome in (Outcome.SLOW, Outcome.MEMORY):
            what = f"{SECONDS:g} s" if reply.outcome is Outcome.SLOW else "memory"
            message = f"the body takes more {what} to read than it may; send a smaller request"
            raise RequestError(message, code="request_too_large")
        if reply.outcome is not Outcome.DONE:
            raise overloaded(503, "the process that reads large bodies has ended; send the request again")

    def close(self) -> None:
        self._helpers.close()
