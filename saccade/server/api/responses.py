"""POST /v1/responses: runs the chat that a request stands for and writes its output as items.

Stateless: nothing is kept between two requests.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

from saccade.server.api.chunks import usage_of
from saccade.server.api.content_blocks import Block, BlockEvent, BlockOutput
from saccade.server.api.events import Event, EventShape
from saccade.server.errors import ApiError
from saccade.server.generation import Delta, Generation
from saccade.server.http.request_context import Exchange
from saccade.server.pipeline import read_request, running_chat, send_answer
from saccade.server.request.chat import ChatRequest
from saccade.server.request.responses import read_response
from saccade.server.service import Service

_FIXED = {"background": False, "previous_response_id": None, "store": False, "truncation": "disabled"}


async def create_response(service: Service, exchange: Exchange) -> None:
    request = await read_request(service, read_response, exchange)
    chat = request.chat
    with request.source_paths.renaming():
        async with running_chat(service, chat, exchange) as generation:
            request_id = exchange.caller.request_id
            shape = ResponseEvents(service.names[0], chat, request.echo, request_id, generation)
            await send_answer(service, exchange, generation, shape, stream=chat.response_options.stream)


class ResponseEvents(EventShape):
    """Every block of the output is one item of the response."""

    def __init__(
        self, model: str, chat: ChatRequest, echo: Mapping[str, Any], request_id: str, generation: Generation
    ) -> None:
        self._output = BlockOutput(chat, generation)
        self._generation = generation
        self._sequence_numbers = itertools.count()
        self._id = chat.response_options.reply_id(request_id)
        self._base = {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **_FIXED,
            **echo,
        }

    # --- the whole ------------------------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        is_cut = self._output.finish_reason == "length"
        status, details = ("incomplete", {"reason": "max_output_tokens"}) if is_cut else ("completed", None)
        response = self._response(status)
        response["incomplete_details"] = details
        response["usage"] = _usage(self._generation)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        output = [self._item(block, _status(block)) for block in self._output.blocks]
        later = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._base, "status": status, "output": output, **later}

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        common = {"id": self._item_id(block), "status": status}
        if block.call is not None:
            call = {"call_id": block.call.id, "name": block.call.name, "arguments": block.text}
            return {**common, "type": "function_call", **call}
        content = [] if status == "in_progress" else [_part(block, block.text)]
        if block.is_reasoning:
            return {**common, "type": "reasoning", "summary": [], "content": content}
        return {**common, "type": "message", "role": "assistant", "content": content}

    def _item_id(self, block: Block) -> str:
        kind = "fc"
        if block.call is None:
            kind = "rs" if block.is_reasoning else "msg"
        return f"{kind}_{self._id}_{block.index}"

    # --- the stream -----------------------------------------------------------------------------------------

    def begin(self) -> Iterator[Event]:
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def take(self, delta: Delta) -> Iterator[Event]:
        for event in self._output.take(delta):
            block = event.block
            if event.kind == "open":
                yield self._item_event("output_item.added", block, "in_progress")
            if block.call is None:
                yield from self._text_events(event)
            else:
                yield from self._call_events(event, block.call.name)
            if event.kind == "close":
                yield self._item_event("output_item.done", block, _status(block))

    def end(self) -> Iterator[Event]:
        response = self.whole()
        yield self._event(response["status"], response=response)

    def failed(self, error: ApiError) -> Mapping[str, Any]:
        response = self._response("failed")
        code = error.code if error.status < 500 and error.code else "server_error"
        response["error"] = {"code": code, "message": error.message}
        return self._event("failed", response=response)

    def _text_events(self, event: BlockEvent) -> Iterator[Event]:
        block = event.block
        texts: tuple[str, dict[str, Any]] = ("output_text", {"logprobs": []})
        name, logprobs = ("reasoning_text", {}) if block.is_reasoning else texts
        if event.kind == "open":
            yield self._part_event("content_part.added", block, part=_part(block, ""))
        elif event.kind == "add":
            yield self._part_event(f"{name}.delta", block, delta=event.text, **logprobs)
        else:
            yield self._part_event(f"{name}.done", block, text=block.text, **logprobs)
            yield self._part_event("content_part.done", block, part=_part(block, block.text))

    def _call_events(self, event: BlockEvent, name: str) -> Iterator[Event]:
        where = {"item_id": self._item_id(event.block), "output_index": event.block.index}
        if event.kind == "add":
            yield self._event("function_call_arguments.delta", **where, delta=event.text)
        elif event.kind == "close":
            yield self._event("function_call_arguments.done", **where, name=name, arguments=event.block.text)

    def _item_event(self, name: str, block: Block, status: str) -> Event:
        return self._event(name, output_index=block.index, item=self._item(block, status))

    def _part_event(self, name: str, block: Block, **fields: Any) -> Event:
        where = {"item_id": self._item_id(block), "output_index": block.index, "content_index": 0}
        return self._event(name, **where, **fields)

    def _event(self, kind: str, **fields: Any) -> Mapping[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(self._sequence_numbers), **fields}


def _status(block: Block) -> str:
    return "incomplete" if block.is_cut else "completed"


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.is_reasoning:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(generation: Generation) -> dict[str, Any]:
    usage = usage_of(generation)
    details = usage["prompt_tokens_details"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": details["cached_tokens"],
            "cache_write_tokens": 0,  # storing a prefix is free
            "image_tokens": details["image_tokens"],
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
