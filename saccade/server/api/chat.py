"""POST /v1/chat/completions: from a checked body to a running chat, and the shape of its answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from saccade.processor.tools import CallStart, Content, ToolDelta
from saccade.server.api.chunks import deliver
from saccade.server.api.logprobs import chat_logprobs
from saccade.server.api.tool_calls import CallFinder
from saccade.server.generation import Delta, Generation
from saccade.server.http.caller import Caller
from saccade.server.http.limits import ByteLease, Upload
from saccade.server.http.response import ResponseWriter
from saccade.server.request.chat import ChatRequest, read_chat
from saccade.server.service import Service


async def answer_chat(
    service: Service, writer: ResponseWriter, upload: Upload, caller: Caller, lease: ByteLease
) -> None:
    request = await service.read(read_chat, await service.decode(upload), caller)
    response_options = request.response_options
    async with service.answering(request, caller, lease) as generation:
        shape = _ChatShape(service, request, caller.request_id, generation)
        del request  # the pictures are with the engine now
        await deliver(writer, generation, shape, response_options)


class _ChatShape:
    """Builds chunks and keeps what a whole answer needs."""

    def __init__(self, service: Service, request: ChatRequest, request_id: str, generation: Generation) -> None:
        self._tokenizer = service.processor.tokenizer
        self._wanted = request.response_options
        self._answers = [_ChatAnswer(request) for _ in generation.answers]
        shown = request.response_options.request_id or request_id
        self._common = {"id": f"chatcmpl-{shown}", "created": int(time.time()), "model": service.names[0]}

    def base(self, *, is_chunk: bool) -> dict[str, Any]:
        return {**self._common, "object": "chat.completion.chunk" if is_chunk else "chat.completion"}

    def chunks(self, piece: Delta) -> Iterator[dict[str, Any]]:
        answer = self._answers[piece.index]
        if not answer.is_open:
            answer.is_open = True
            yield self._choice(Delta(piece.index), {"role": "assistant", "content": ""})
        deltas = answer.take(piece)
        is_worth_it = piece.finish_reason or piece.logprobs or (self._wanted.return_token_ids and piece.token_ids)
        if not deltas and is_worth_it:
            deltas = [{}]
        for delta in deltas[:-1]:
            yield self._choice(Delta(piece.index), delta)
        if deltas:
            piece.finish_reason = answer.finish_reason(piece.finish_reason)
            yield self._choice(piece, deltas[-1])

    def choices(self) -> list[dict[str, Any]]:
        whole = []
        for index, answer in enumerate(self._answers):
            piece = answer.whole(index)
            piece.finish_reason = answer.finish_reason(piece.finish_reason)
            choice = self._choice(piece, answer.message())
            choice["message"] = choice.pop("delta")
            whole.append(choice)
        return whole

    def _choice(self, piece: Delta, delta: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self._wanted.params.logprobs is not None:
            logprobs = chat_logprobs(piece.shown_ids, piece.logprobs, self._tokenizer, self._wanted.shows_ids)
        choice = {
            "index": piece.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        return choice | ({"token_ids": piece.token_ids} if self._wanted.return_token_ids else {})


class _ChatAnswer:
    """One answer as far as it is known: its text, the calls found in it, and the tokens to report."""

    def __init__(self, request: ChatRequest) -> None:
        self.is_open = False
        self._found = CallFinder(request)
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._seen = Delta(0)

    def take(self, piece: Delta) -> list[dict[str, Any]]:
        """The deltas a piece gives."""
        self._seen.token_ids += piece.token_ids
        self._seen.shown_ids += piece.shown_ids
        self._seen.logprobs += piece.logprobs
        self._seen.finish_reason, self._seen.stop_reason = piece.finish_reason, piece.stop_reason
        found = self._found.take(piece)
        for delta in found:
            self._keep(delta)
        return [delta.delta() for delta in found]

    def _keep(self, delta: ToolDelta) -> None:
        if isinstance(delta, Content):
            self._content.append(delta.text)
        elif isinstance(delta, CallStart):
            self._calls.append({"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}})
        else:
            self._calls[delta.index]["function"]["arguments"] += delta.arguments

    def finish_reason(self, reason: str | None) -> str | None:
        return self._found.finish_reason(reason)

    def whole(self, index: int) -> Delta:
        self._seen.index = index
        return self._seen

    def message(self) -> dict[str, Any]:
        text = "".join(self._content)
        message = {"role": "assistant", "content": text, "refusal": None}
        return {**message, "content": text or None, "tool_calls": self._calls} if self._calls else message
