"""POST /v1/messages: the chat behind it, and the shape of its answers in Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from saccade.server.api.chunks import usage_of
from saccade.server.api.content_blocks import Added, Block, BlockAnswer, Opened
from saccade.server.api.events import Event, send_events
from saccade.server.errors import ApiError
from saccade.server.generation import Delta, Generation
from saccade.server.http.caller import Caller
from saccade.server.http.limits import ByteLease, Upload
from saccade.server.http.response import ResponseWriter
from saccade.server.request.chat import ChatRequest
from saccade.server.request.messages import read_message
from saccade.server.service import Service

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


async def answer_message(
    service: Service, writer: ResponseWriter, upload: Upload, caller: Caller, lease: ByteLease
) -> None:
    chat, places = await service.read(read_message, await service.decode(upload), caller)
    with places.renaming():
        async with service.answering(chat, caller, lease) as generation:
            script = MessageEvents(service.names[0], chat, caller.request_id, generation)
            stream = chat.response_options.stream
            del chat  # the pictures are with the engine now
            await send_events(writer, generation, script, stream=stream)


class MessageEvents:
    """One message; see `EventShape`."""

    def __init__(self, model: str, chat: ChatRequest, request_id: str, generation: Generation) -> None:
        self._answer = BlockAnswer(chat)
        self._generation = generation
        self._request_id = request_id
        shown = chat.response_options.request_id or request_id
        self._base = {"id": f"msg_{shown}", "type": "message", "role": "assistant", "model": model}

    def whole(self) -> dict[str, Any]:
        content = [_content(block) for block in self._answer.blocks]
        return {**self._base, "content": content, **self._stop(), "usage": _usage(self._generation)}

    def begin(self) -> Iterator[Event]:
        unknown: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": {**self._base, **unknown, "usage": _usage(self._generation)}}

    def ping(self) -> Event:
        return {"type": "ping"}

    def take(self, piece: Delta) -> Iterator[Event]:
        for event in self._answer.take(piece):
            index = event.block.index
            if isinstance(event, Opened):
                yield {"type": "content_block_start", "index": index, "content_block": _content(event.block)}
            elif isinstance(event, Added):
                yield {"type": "content_block_delta", "index": index, "delta": _delta(event)}
            else:
                yield {"type": "content_block_stop", "index": index}

    def end(self) -> Iterator[Event]:
        yield {"type": "message_delta", "delta": self._stop(), "usage": _usage(self._generation)}
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> Event:
        return error.anthropic_body(self._request_id)

    def _stop(self) -> dict[str, Any]:
        """Why the answer ended. Only a string of the client's is a stop sequence; end tokens are not."""
        answer = self._answer
        reason = _STOP_REASONS.get(str(answer.finish_reason))
        sequence = answer.stop_reason if reason is None and isinstance(answer.stop_reason, str) else None
        return {"stop_reason": reason or ("stop_sequence" if sequence else "end_turn"), "stop_sequence": sequence}


def _content(block: Block) -> dict[str, Any]:
    """A block as far as it is known. A call's arguments are JSON only when they are whole, and empty before."""
    if block.call is None:
        return {"type": "text", "text": block.text}
    given = json.loads(block.text) if block.text else {}
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": given}


def _delta(event: Added) -> dict[str, Any]:
    if event.block.call is None:
        return {"type": "text_delta", "text": event.text}
    return {"type": "input_json_delta", "partial_json": event.text}


def _usage(generation: Generation) -> dict[str, Any]:
    """Here what was found in the cache is not part of the input. It is known when the answer is complete."""
    usage = usage_of(generation)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,  # nothing is charged for what the prefix cache keeps
        "output_tokens": usage["completion_tokens"],
    }
