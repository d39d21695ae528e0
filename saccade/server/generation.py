"""Answers on their way: requests submitted to the engine, their events turned into text, their cost and times.

One `Generation` is the answers to one HTTP request: `n` to each of its prompts. Knows no HTTP and no JSON.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from saccade.engine.ipc.client import EngineUnavailable, RequestStream
from saccade.errors import RequestError
from saccade.processor.output import RequestOutputBuilder
from saccade.server.metrics import Finished, Metrics
from saccade.types import Bill, Logprobs, Prompt, Request, TokenEvent

KEEP_ALIVE_SECONDS = 5.0
"""Silence after which a stream shows that it is alive: a large picture's prefill may outlast a proxy's patience."""


class SubmitsRequests(Protocol):
    """The part of the engine client that generation needs."""

    async def submit(self, requests: Sequence[Request]) -> list[RequestStream]: ...


@dataclass(slots=True)
class Delta:
    """What some events add to one answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    shown_ids: list[int] = field(default_factory=list)  # the same without the token that ended the answer
    logprobs: list[Logprobs] = field(default_factory=list)  # of `shown_ids`, when they were asked for
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class BilledPrompt:
    """A prompt and what it costs."""

    prompt: Prompt
    bill: Bill


@dataclass(frozen=True, slots=True)
class Timing:
    arrived: float  # on the clock of time.perf_counter
    prepare_ms: float  # reading the body, fetching and pricing pictures, building the prompt
    fetch_ms: float


class Generation:
    """A context: leaving it, for whatever reason, frees all that its requests hold in the engine."""

    def __init__(
        self, prompts: Sequence[BilledPrompt], answers: Sequence[RequestOutputBuilder], timing: Timing, metrics: Metrics
    ) -> None:
        # Not the prompts themselves: they hold pictures, which the engine has by now.
        self.bills = [billed.bill for billed in prompts]
        self.prompt_ids = [billed.prompt.token_ids for billed in prompts]
        self._where = [billed.prompt.where for billed in prompts]
        self.answers = answers
        self._max_tokens = 0
        self._timing = timing
        self._metrics = metrics
        self._streams: list[RequestStream] = []
        self._has_media = any(bill.items for bill in self.bills)
        self._last: list[float | None] = [None] * len(answers)  # when the latest token of each answer came
        self._first: float | None = None

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.cancel()

    @property
    def per_prompt(self) -> int:
        return len(self.answers) // len(self.bills)

    async def submit(self, engine: SubmitsRequests, requests: Sequence[Request]) -> None:
        """All of them or none."""
        self._max_tokens = max(request.max_tokens for request in requests)
        try:
            self._streams = await engine.submit(requests)
        except RequestError as error:
            raise error.located(self._where[0]) from None  # only chats have pictures, and a chat is one prompt

    # --- tokens become text -----------------------------------------------------------------------------------------

    async def pieces(self) -> AsyncIterator[Delta | None]:
        """What is new, answer by answer; None when nothing came for a while. RequestError ends all of it."""
        waits = {asyncio.ensure_future(anext(stream, None)): index for index, stream in enumerate(self._streams)}
        try:
            while waits:
                done, _ = await asyncio.wait(waits, timeout=KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    yield None
                for wait in done:
                    index = waits.pop(wait)
                    events = wait.result()
                    if events is not None:
                        waits[asyncio.ensure_future(anext(self._streams[index], None))] = index
                        piece = self._take(index, events)
                        if piece is not None:
                            yield piece
        finally:
            for wait in waits:
                wait.cancel()

    def _take(self, index: int, events: Sequence[TokenEvent]) -> Delta | None:
        """None for what comes after a stop string: only the usage of the request that was cancelled for it."""
        answer, piece = self.answers[index], Delta(index)
        if answer.is_finished:
            answer.usage = events[-1].usage or answer.usage
            return None
        for event in events:
            if self._push(answer, event, piece):
                self._streams[index].cancel()  # a stop string; the engine goes on otherwise
                answer.usage = events[-1].usage or answer.usage
                break
        piece.finish_reason, piece.stop_reason = answer.finish_reason, answer.stop_reason
        self._count(index, len(piece.token_ids))
        return piece

    def _push(self, answer: RequestOutputBuilder, event: TokenEvent, piece: Delta) -> bool:
        """True when the answer is complete."""
        if event.error is not None:
            raise event.error.located(self._where[answer.index // self.per_prompt])
        if event.finish_reason == "abort":
            raise EngineUnavailable("the engine gave the request up; send it again", 1.0)
        piece.text += answer.push(event)
        if event.token_id is not None:
            piece.token_ids.append(event.token_id)
            if event.stop_token_id is None:
                piece.shown_ids.append(event.token_id)
                piece.logprobs += [event.logprobs] if event.logprobs is not None else []
        return answer.is_finished

    def _count(self, index: int, count: int) -> None:
        if not count:
            return
        self._metrics.tokens_out += count
        now, last = time.perf_counter(), self._last[index]
        if self._first is None:
            self._first = now
            self._metrics.first_token(now - self._timing.arrived, has_media=self._has_media)
        if last is not None:
            self._metrics.next_tokens(now - last, count, has_media=self._has_media)
        self._last[index] = now

    # --- when all is said ---------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Tell the metrics; called once, when every answer is complete."""
        now = time.perf_counter()
        self._metrics.finished(
            Finished(
                bills=self.bills,
                usages=[answer.usage for answer in self.answers if answer.usage is not None],
                finish_reasons=[str(answer.finish_reason) for answer in self.answers],
                generated=[len(answer.token_ids) for answer in self.answers],
                max_tokens=self._max_tokens,
                seconds=now - self._timing.arrived,
                decode_seconds=now - (self._first or now),
            )
        )

    @property
    def cached_tokens(self) -> int:
        """Of each prompt once: the further answers to it find what the first one left."""
        firsts = self.answers[:: self.per_prompt]
        return sum(answer.usage.cached_tokens for answer in firsts if answer.usage is not None)

    def bill(self, index: int) -> Bill:
        """A prompt's bill with what its first answer took, as far as it is known."""
        bill, usage = self.bills[index], self.answers[index * self.per_prompt].usage
        return bill.settled(usage, {"prepare": self._timing.prepare_ms, "fetch": self._timing.fetch_ms})
