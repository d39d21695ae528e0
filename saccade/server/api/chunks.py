"""From running answers to the client: whole or as a stream, in whatever shape the route gives it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Protocol

from saccade.server.generation import Delta, Generation
from saccade.server.http.response import ResponseWriter
from saccade.server.request.chat import ResponseOptions
from saccade.types import Bill


class Shape(Protocol):
    """How a route writes answers. `base` is what all chunks have in common."""

    def base(self, *, is_chunk: bool) -> dict[str, Any]: ...

    def chunks(self, piece: Delta) -> Iterable[dict[str, Any]]:
        """The `choices` entries of a stream that a piece gives, one chunk each."""

    def choices(self) -> list[dict[str, Any]]:
        """All answers, once every piece has been seen."""


async def deliver(
    writer: ResponseWriter, generation: Generation, shape: Shape, response_options: ResponseOptions
) -> None:
    """Run the generation to its end. Errors before the first byte are the caller's to answer with a status."""
    if response_options.stream:
        await _stream(writer, generation, shape, response_options)
        return
    async for piece in generation.pieces():
        if piece is not None:
            list(shape.chunks(piece))
    generation.finish()
    whole = {**shape.base(is_chunk=False), "choices": shape.choices(), "usage": usage_of(generation)}
    await writer.json({**whole, **_extras(generation, response_options)})


async def _stream(
    writer: ResponseWriter, generation: Generation, shape: Shape, response_options: ResponseOptions
) -> None:
    """The status goes out with the first token, so that a picture that cannot be decoded is still a plain 400."""
    base = shape.base(is_chunk=True) | ({"usage": None} if response_options.include_usage else {})
    async for piece in generation.pieces():
        if piece is None:
            await writer.keep_alive()
            continue
        for choice in shape.chunks(piece):
            usage = {"usage": usage_of(generation)} if response_options.continuous_usage else {}
            await writer.event({**base, "choices": [choice], **usage})
    generation.finish()
    if response_options.include_usage or response_options.include_bill or response_options.return_token_ids:
        usage = {"usage": usage_of(generation)} if response_options.include_usage else {}
        await writer.event({**base, "choices": [], **usage, **_extras(generation, response_options)})
    await writer.done()


def usage_of(generation: Generation) -> dict[str, Any]:
    bills = generation.bills
    prompt_tokens = sum(bill.prompt_tokens for bill in bills)
    completion_tokens = sum(len(answer.token_ids) for answer in generation.answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": generation.cached_tokens,
            "text_tokens": sum(bill.text_tokens for bill in bills),
            "image_tokens": sum(bill.image_tokens for bill in bills),
            "video_tokens": sum(bill.video_tokens for bill in bills),
        },
    }


def _extras(generation: Generation, response_options: ResponseOptions) -> dict[str, Any]:
    """What only a client gets that asked for it."""
    extras: dict[str, Any] = {}
    bills = [bill_body(generation.bill(index)) for index in range(len(generation.bills))]
    if response_options.include_bill:
        extras["bill"] = bills[0] if len(bills) == 1 else bills
    if response_options.return_token_ids:
        ids = [list(token_ids) for token_ids in generation.prompt_ids]
        extras["prompt_token_ids"] = ids[0] if len(ids) == 1 else ids
    return extras


def bill_body(bill: Bill) -> dict[str, Any]:
    return {**asdict(bill), "prompt_tokens": bill.prompt_tokens}
