"""POST /v1/messages: runs the chat that a request stands for and writes its output in Anthropic's form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from saccade.processor.dialects.arguments import object_text, parsed_object
from saccade.server.api.chunks import usage_of
from saccade.server.api.content_blocks import Block, BlockEvent, BlockOutput
from saccade.server.api.events import Event, EventShape
from saccade.server.errors import ApiError
from saccade.server.generation import Delta, Generation
from saccade.server.http.request_context import Exchange
from saccade.server.pipeline import read_request, running_chat, send_answer
from saccade.server.request.chat import ChatRequest
from saccade.server.request.messages import read_message
from saccade.server.service import Service

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


async def create_message(service: Service, exchange: Exchange) -> None:
    request = await read_request(service, read_message, exchange)
    chat = request.chat
    with request.source_paths.renaming():
        async with running_chat(service, chat, exchange) as generation:
            shape = MessageEvents(service.names[0], chat, exchange.caller.request_id, generation)
            await send_answer(service, exchange, generation, shape, stream=chat.response_options.stream)


class MessageEvents(EventShape):
    def __init__(self, model: str, chat: ChatRequest, request_id: str, generation: Generation) -> None:
        self._output = BlockOutput(chat, generation)
        self._generation = generation
        self._request_id = request_id
        message_id = f"msg_{chat.response_options.reply_id(request_id)}"
        self._base = {"id": message_id, "type": "message", "role": "assistant", "model": model}

    def whole(self) -> dict[str, Any]:
        content = [_content(block) for block in self._output.blocks]
        return {**self._base, "content": content, **self._stop(), "usage": _usage(self._generation)}

    def begin(self) -> Iterator[Event]:
        unknown: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._base, **unknown, "usage": _usage(self._generation)}
        yield {"type": "message_start", "message": message}

    def ping(self) -> Event:
        return {"type": "ping"}

    def take(self, delta: Delta) -> Iterator[Event]:
        for event in self._output.take(delta):
            index = event.block.index
            if event.kind == "open":
                yield {"type": "content_block_start", "index": index, "content_block": _content(event.block)}
            elif event.kind == "add":
                yield {"type": "content_block_delta", "index": index, "delta": _delta(event)}
            else:
                yield {"type": "content_block_stop", "index": index}

    def end(self) -> Iterator[Event]:
        yield {"type": "message_delta", "delta": self._stop(), "usage": _usage(self._generation)}
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> Mapping[str, Any]:
        return error.anthropic_body(self._request_id)

    def _stop(self) -> dict[str, Any]:
        """Why the output ended. Only a stop string of the client is a stop sequence; an EOS token is not."""
        reason = _STOP_REASONS.get(str(self._output.finish_reason))
        if reason is not None:
            return {"stop_reason": reason, "stop_sequence": None}
        sequence = self._output.stop_reason
        if isinstance(sequence, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _content(block: Block) -> dict[str, Any]:
    """A block so far. Arguments that are no JSON are given as Anthropic advises to send them back."""
    if block.is_reasoning:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.call is None:
        return {"type": "text", "text": block.text}
    arguments: Any = {"INVALID_JSON": block.text}
    if parsed_object(block.text) is not None:
        arguments = msgspec.Raw(object_text(block.text).encode())  # as written: encoding could fail, or round
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": arguments}


def _delta(event: BlockEvent) -> dict[str, Any]:
    if event.block.is_reasoning:
        return {"type": "thinking_delta", "thinking": event.text}
    if event.block.call is None:
        return {"type": "text_delta", "text": event.text}
    return {"type": "input_json_delta", "partial_json": event.text}


def _usage(generation: Generation) -> dict[str, Any]:
    """Anthropic's input tokens exclude cached ones. Their number is known when the output is complete."""
    usage = usage_of(generation)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,  # storing a prefix is free
        "output_tokens": usage["completion_tokens"],
    }
