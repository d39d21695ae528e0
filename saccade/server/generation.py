"""The running outputs of one HTTP request: token events become text deltas, bills and metrics.

A `Generation` has as many outputs for each prompt of the request. Knows no HTTP and no JSON.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from saccade.engine.ipc.client import EngineUnavailable, RequestStream
from saccade.errors import RequestError
from saccade.processor.dialects.parser import PLAIN, OutputFormat
from saccade.processor.dialects.reader import Problem
from saccade.processor.output import RequestOutputBuilder, best_outputs
from saccade.server.accounts import Account, TenantCharge
from saccade.server.http.limits import ByteLease
from saccade.server.metrics import Finished, Metrics
from saccade.server.request_record import RequestRecord, TokenCounts
from saccade.types.bill import Bill
from saccade.types.events import TokenEvent
from saccade.types.media import PIXELS_PER_SECOND
from saccade.types.prompt import Prompt
from saccade.types.request import Request
from saccade.types.step import Logprobs

logger = logging.getLogger("saccade.server")

Outputs = Sequence[RequestOutputBuilder]
_PROBLEMS: Mapping[Problem, str] = {
    "syntax": "the model wrote one that cannot be read",
    "incomplete": "the output ended inside of it",
    "unknown_tool": "the model named a tool that the request does not offer",
    "schema": "its arguments do not follow the schema of the tool",
}
KEEP_ALIVE_SECONDS = 5.0
"""A stream sends something after this time: the prefill of large images may outlast a proxy's timeout."""


class SubmitsRequests(Protocol):
    """The part of the engine client that a generation needs."""

    async def submit(self, requests: Sequence[Request]) -> list[RequestStream]: ...


@dataclass(slots=True)
class Delta:
    """What some token events add to one output."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    shown_ids: list[int] = field(default_factory=list)  # without the stop token
    logprobs: list[Logprobs] = field(default_factory=list)  # of `shown_ids`, if asked for
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def is_text(self) -> bool:
        """Text and nothing that ends it."""
        return self.text != "" and self.finish_reason is None

    def add(self, later: Delta) -> None:
        self.text += later.text
        self.token_ids += later.token_ids
        self.shown_ids += later.shown_ids
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


class BilledPrompt(NamedTuple):
    """A prompt and its cost."""

    prompt: Prompt
    bill: Bill


class Generation:
    """A context manager: leaving it cancels the requests that still run."""

    def __init__(
        self,
        prompts: Sequence[BilledPrompt],
        outputs: Outputs,
        record: RequestRecord,
        metrics: Metrics,
        output_format: OutputFormat = PLAIN,
    ) -> None:
        self.output_format = output_format
        # Not the prompts themselves: they hold images, which the engine has by now.
        self.bills = [bill for _, bill in prompts]
        self.prompt_ids = [prompt.token_ids for prompt, _ in prompts]
        self._decode_seconds = [_decode_seconds(prompt) for prompt, _ in prompts]
        self._where = [prompt.where for prompt, _ in prompts]
        self.outputs = outputs
        self._max_tokens = 0
        self._account: Account | None = None
        self._charge: TenantCharge | None = None  # until it is settled
        self._lease: ByteLease | None = None  # that holds its pixels
        self._reserved_tokens = 0
        self._is_refused = False  # the engine had no place for it
        self._record = record
        self._arrived = record.time_of("arrived")
        self._metrics = metrics
        self._streams: list[RequestStream] = []
        self._has_media = any(bill.items for bill in self.bills)
        self._reasoning_tokens = [0] * len(outputs)
        self._last: list[float | None] = [None] * len(outputs)  # time of the last token of each output
        self._first: float | None = None

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.cancel()
        self._settle()
        self._release_pixels()
        self._fill_record()

    def _fill_record(self) -> None:
        counts = TokenCounts(
            prompt_tokens=self._prompt_tokens,
            image_tokens=sum(bill.image_tokens + bill.video_tokens for bill in self.bills),
            cached_tokens=self.cached_tokens,
            completion_tokens=self._generated_tokens,
        )
        self._record.count(counts, self.outputs[0].usage)

    def hold_pixels(self, lease: ByteLease) -> None:
        """Until its first token. ApiError if too many of the client's wait."""
        lease.hold_pixels(self._pixels)
        self._lease = lease

    def _release_pixels(self) -> None:
        if self._lease is not None:
            self._lease.release_pixels()
            self._lease = None

    def charge(self, account: Account, reserved_tokens: int) -> None:
        """Charges a tenant for the prompts and, in advance, the outputs. ApiError if its limits refuse it."""
        self._account = account
        self._charge = account.take(tokens=self._prompt_tokens + reserved_tokens, pixels=self._pixels)
        self._reserved_tokens = reserved_tokens

    def _settle(self) -> None:
        """Gives back, once, what was charged and not used.

        The prompt is built and sent by now, so it is charged, whether its client stays or leaves. All comes
        back where the engine had no place.
        """
        charge = self._charge
        self._charge = None
        if charge is None:
            return
        if self._is_refused:
            charge.give_back(tokens=self._prompt_tokens + self._reserved_tokens, pixels=self._pixels)
            return
        generated = self._generated_tokens
        charge.give_back(tokens=self._reserved_tokens - generated)  # negative: more than was reserved
        self._metrics.tenants.used(charge.label, self._prompt_tokens, generated, self._pixels)
        self._charge_decoding()

    def _charge_decoding(self) -> None:
        """Decoding images is no step, which the fair queue counts.

        It is charged as the engine reports it with the end of an answer; by the images' price where a client
        leaves before, or an image fails, so that neither makes decoding free.
        """
        assert self._account is not None
        usages = (output.usage for output in self.outputs[:: self.per_prompt])
        seconds = sum(
            expected if usage is None else usage.decode_ms / 1e3
            for usage, expected in zip(usages, self._decode_seconds, strict=True)
        )
        self._account.use_processor(seconds)
        self._metrics.tenants.worked(self._account.settings.label, seconds)

    @property
    def _prompt_tokens(self) -> int:
        return sum(bill.prompt_tokens for bill in self.bills)

    @property
    def _generated_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self._streams)

    @property
    def _pixels(self) -> int:
        return sum(bill.pixels for bill in self.bills)

    @property
    def per_prompt(self) -> int:
        return len(self.outputs) // len(self.bills)

    async def submit(self, engine: SubmitsRequests, requests: Sequence[Request]) -> None:
        """All of them or none."""
        self._max_tokens = max(request.max_tokens for request in requests)
        self._record.mark("submitted")
        try:
            self._streams = await engine.submit(requests)
        except EngineUnavailable:
            self._is_refused = True
            raise
        except RequestError as error:
            self._is_refused = error.code == "overloaded"
            raise error.located(self._where[0]) from None  # only chats have images, and a chat is one prompt

    async def deltas(self) -> AsyncIterator[Delta | None]:
        """Deltas of all outputs as they arrive; None after some time without one. A RequestError ends it."""
        reading = dict(enumerate(self._streams))
        while reading:
            for index, stream in list(reading.items()):
                delta = self._take(index, stream.take())
                if delta is not None:
                    yield delta
                if stream.is_read:
                    del reading[index]
            if reading and not await self._streams[0].news.wait(KEEP_ALIVE_SECONDS):
                yield None

    def _take(self, index: int, events: Sequence[TokenEvent]) -> Delta | None:
        """None without events, and after a stop string: the cancelled request only reports its usage."""
        if not events:
            return None
        output = self.outputs[index]
        if events[-1].usage is not None:
            output.usage = events[-1].usage
        if output.is_finished:
            return None
        delta = Delta(index)
        for event in events:
            if self._push(output, event, delta):
                self._streams[index].cancel()  # for a stop string, which the engine does not know
                break
        delta.finish_reason = output.finish_reason
        delta.stop_reason = output.stop_reason
        self._count(index, len(delta.token_ids))
        return delta

    def _push(self, output: RequestOutputBuilder, event: TokenEvent, delta: Delta) -> bool:
        """Returns whether the output is complete."""
        if event.error is not None:
            raise event.error.located(self._where[output.index // self.per_prompt])
        if event.finish_reason == "abort":
            raise EngineUnavailable("the engine gave the request up; send it again", 1.0)
        delta.text += output.push(event)
        if event.token_id is not None:
            delta.token_ids.append(event.token_id)
            if event.stop_token_id is None:
                delta.shown_ids.append(event.token_id)
                if event.logprobs is not None:
                    delta.logprobs.append(event.logprobs)
        return output.is_finished

    def _count(self, index: int, count: int) -> None:
        if not count:
            return
        self._metrics.tokens_out += count
        now = time.perf_counter()
        last = self._last[index]
        if self._first is None:
            self._first = now
            self._release_pixels()
            self._metrics.first_token(now - self._arrived, has_media=self._has_media)
        if last is not None:
            self._metrics.next_tokens(now - last, count, has_media=self._has_media)
        self._last[index] = now

    def finish(self) -> None:
        """Reports to the metrics. Called once, when every output is complete."""
        self._settle()  # before a response that is not streamed says what is left
        now = time.perf_counter()
        self._metrics.finished(
            Finished(
                bills=self.bills,
                usages=[output.usage for output in self.outputs if output.usage is not None],
                finish_reasons=[str(output.finish_reason) for output in self.outputs],
                generated=[len(output.token_ids) for output in self.outputs],
                max_tokens=self._max_tokens,
                seconds=now - self._arrived,
                decode_seconds=now - (self._first or now),
            )
        )

    def best(self, n: int) -> list[int]:
        """Numbers of the outputs to return: the `n` best of each prompt."""
        size = self.per_prompt
        groups = [self.outputs[first : first + size] for first in range(0, len(self.outputs), size)]
        return [output.index for group in groups for output in best_outputs(group, n)]

    def prompt_logprobs(self, index: int, count: int) -> list[Logprobs]:
        """Those of an output's prompt, from its second token on, with so many alternatives."""
        entries = self.outputs[index - index % self.per_prompt].prompt_entries()
        assert entries is not None, "they come with the first token of the first output"
        return [entry._replace(top=entry.top[:count]) for entry in entries]

    def prompt_ids_of(self, index: int) -> Sequence[int]:
        return self.prompt_ids[index // self.per_prompt]

    def count_reasoning(self, index: int, new: int, is_thinking: bool) -> None:
        """The last `new` tokens of an output were thinking, or its end if it `is_thinking` no more."""
        output = self.outputs[index]
        total = len(output.token_ids)
        thinking = self.output_format.thinking
        if not is_thinking and thinking is not None:
            total = output.tokens_through(thinking.close, total - new)
        self._reasoning_tokens[index] = total

    @property
    def reasoning_tokens(self) -> int:
        return sum(self._reasoning_tokens)

    def report_call(self, problem: Problem) -> None:
        """A tool call of an output is not as it should be."""
        self._metrics.tool_call_problem(problem)
        logger.warning("a tool call: %s", _PROBLEMS[problem])

    @property
    def cached_tokens(self) -> int:
        """Counted once per prompt: its other outputs find what the first one has cached."""
        firsts = self.outputs[:: self.per_prompt]
        return sum(output.usage.cached_tokens for output in firsts if output.usage is not None)

    def bill(self, index: int) -> Bill:
        """The bill of a prompt with the cache hits and times of its first output, as far as known."""
        usage = self.outputs[index * self.per_prompt].usage
        record = self._record
        times = {
            "prepare": record.ms_between("arrived", "prepared"),
            "fetch": record.ms_between("fetch_began", "fetched"),
        }
        return self.bills[index].settled(usage, times)


def _decode_seconds(prompt: Prompt) -> float:
    """CPU time by the price of the images; one that comes again is decoded once."""
    prices = {item.key: item.price for item in prompt.items}
    return sum(prices.values()) / PIXELS_PER_SECOND
