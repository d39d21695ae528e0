"""What surrounds the choices of OpenAI's chat and text completions: id, model, usage, bill."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from saccade.server.api.events import Event
from saccade.server.generation import Delta, Generation
from saccade.server.http.response import event_bytes
from saccade.server.request.chat import ResponseOptions
from saccade.types.bill import Bill

DONE = b"data: [DONE]\n\n"
_MARK = secrets.token_hex(16)  # stands for the text, and nowhere else


class TextEvent:
    """An event that differs from token to token in its text only: the rest is encoded once."""

    def __init__(self, make: Callable[[str], Mapping[str, Any]]) -> None:
        self._before, self._after = event_bytes(make(_MARK)).split(msgspec.json.encode(_MARK))

    def __call__(self, text: str) -> bytes:
        return self._before + msgspec.json.encode(text) + self._after


class Envelope:
    """Wraps choices into the body of a completion or of one chunk of its stream."""

    def __init__(
        self, prefix: str, request_id: str, model: str, options: ResponseOptions, generation: Generation
    ) -> None:
        self._options = options
        self._generation = generation
        reply_id = f"{prefix}-{options.reply_id(request_id)}"
        self._base = {"id": reply_id, "created": int(time.time()), "model": model}

    def choice(self, delta: Delta, key: str, content: Any, logprobs: Any) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.index,
            key: content,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._options.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def chunk(self, kind: str, choice: dict[str, Any]) -> Mapping[str, Any]:
        return self._chunk(kind, [choice], with_usage=self._options.continuous_usage)

    def last_chunk(self, kind: str) -> Iterator[Event]:
        """Usage, bill and prompt ids in a chunk without choices, if the client asked for one of them."""
        options = self._options
        if any((options.include_usage, options.include_bill, options.return_token_ids)):
            yield {**self._chunk(kind, [], with_usage=options.include_usage), **self._extras()}

    def _chunk(self, kind: str, choices: Sequence[dict[str, Any]], *, with_usage: bool) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._base, "object": kind}
        if self._options.include_usage:  # OpenAI: null in every chunk but the last
            chunk["usage"] = usage_of(self._generation) if with_usage else None
        chunk["choices"] = choices
        return chunk

    def whole(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        usage = usage_of(self._generation)
        return {**self._base, "object": kind, "choices": choices, "usage": usage, **self._extras()}

    def _extras(self) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._options.include_bill:
            bills = [bill_body(self._generation.bill(index)) for index in range(len(self._generation.bills))]
            extras["bill"] = one_or_all(bills)
        if self._options.return_token_ids:
            ids = [list(token_ids) for token_ids in self._generation.prompt_ids]
            extras["prompt_token_ids"] = one_or_all(ids)
        return extras


def one_or_all(values: Sequence[Any]) -> Any:
    """A list only where there are several prompts."""
    return values[0] if len(values) == 1 else values


def usage_of(generation: Generation) -> dict[str, Any]:
    completion_tokens = sum(len(output.token_ids) for output in generation.outputs)
    usage = prompt_usage(generation.bills, generation.cached_tokens, completion_tokens)
    return {**usage, "completion_tokens_details": {"reasoning_tokens": generation.reasoning_tokens}}


def prompt_usage(bills: Sequence[Bill], cached_tokens: int, completion_tokens: int = 0) -> dict[str, Any]:
    prompt_tokens = sum(bill.prompt_tokens for bill in bills)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": cached_tokens,
            "text_tokens": sum(bill.text_tokens for bill in bills),
            "image_tokens": sum(bill.image_tokens for bill in bills),
            "video_tokens": sum(bill.video_tokens for bill in bills),
        },
    }


def bill_body(bill: Bill) -> dict[str, Any]:
    return {**asdict(bill), "prompt_tokens": bill.prompt_tokens}
