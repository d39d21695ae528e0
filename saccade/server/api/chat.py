"""POST /v1/chat/completions: runs a chat and writes its outputs as OpenAI's choices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from saccade.processor.dialects.events import CallStart, Content, Reasoning
from saccade.server.api.chunks import DONE, Envelope, TextEvent
from saccade.server.api.events import Event, EventShape
from saccade.server.api.logprobs import chat_logprobs, prompt_body
from saccade.server.api.parsed_output import OutputPart, ParsedOutput
from saccade.server.generation import Delta, Generation
from saccade.server.http.request_context import Exchange
from saccade.server.pipeline import read_request, running_chat, send_answer
from saccade.server.request.chat import ChatRequest, read_chat
from saccade.server.service import Service


async def create_chat_completion(service: Service, exchange: Exchange) -> None:
    request = await read_request(service, read_chat, exchange)
    async with running_chat(service, request, exchange) as generation:
        shape = ChatEvents(service, request, exchange.caller.request_id, generation)
        await send_answer(service, exchange, generation, shape, stream=request.response_options.stream)


class ChatEvents(EventShape):
    end_marker = DONE

    def __init__(self, service: Service, chat: ChatRequest, request_id: str, generation: Generation) -> None:
        options = chat.response_options
        self._options = options
        self._tokenizer = service.processor.tokenizer
        self._outputs = [_ChatOutput(chat, generation, index) for index in range(len(generation.outputs))]
        self._envelope = Envelope("chatcmpl", request_id, service.names[0], options, generation)
        self._generation = generation
        self.is_large = options.prompt_logprobs is not None
        self._texts: dict[int, TextEvent] = {}  # by output
        extras = (chat.tools.calls, options.return_token_ids, options.continuous_usage, not options.stream)
        self.is_plain = options.params.logprobs is None and not any(extras)

    def take(self, delta: Delta) -> Iterator[Event]:
        output = self._outputs[delta.index]
        if self.is_plain and output.is_passive and delta.is_text:
            yield self._text_event(delta.index)(delta.text)
            return
        if not output.is_open:
            output.is_open = True
            yield self._chunk(Delta(delta.index), {"role": "assistant", "content": ""})
        messages = output.take(delta)
        if not messages and self._has_rest(delta):
            messages = [{}]
        for message in messages[:-1]:
            yield self._chunk(Delta(delta.index), message)
        if messages:
            delta.finish_reason = output.finish_reason(delta.finish_reason)
            yield self._chunk(delta, messages[-1])

    def _has_rest(self, delta: Delta) -> bool:
        """Whether a delta that completes no part says something else."""
        token_ids = self._options.return_token_ids and delta.token_ids
        return any((token_ids, delta.logprobs, delta.finish_reason))

    def _text_event(self, index: int) -> TextEvent:
        """Makes most events of most streams. Nothing is kept of its text: only `whole` would need it."""
        if index not in self._texts:
            self._texts[index] = TextEvent(lambda text: self._chunk(Delta(index), {"content": text}))
        return self._texts[index]

    def end(self) -> Iterator[Event]:
        return self._envelope.last_chunk("chat.completion.chunk")

    def whole(self) -> dict[str, Any]:
        generation = self._generation
        best = [self._outputs[index] for index in generation.best(self._options.params.n)]
        choices = [
            self._choice(output.total(), "message", output.message()) | {"index": index}
            for index, output in enumerate(best)
        ]
        body = self._envelope.whole("chat.completion", choices)
        count = self._options.prompt_logprobs
        if count is not None:
            entries = generation.prompt_logprobs(0, count)
            body["prompt_logprobs"] = prompt_body(generation.prompt_ids_of(0), entries, self._tokenizer)
        return body

    def _chunk(self, delta: Delta, message: dict[str, Any]) -> Mapping[str, Any]:
        return self._envelope.chunk("chat.completion.chunk", self._choice(delta, "delta", message))

    def _choice(self, delta: Delta, key: str, message: dict[str, Any]) -> dict[str, Any]:
        options = self._options
        logprobs = None
        if options.params.logprobs is not None:
            logprobs = chat_logprobs(delta.shown_ids, delta.logprobs, self._tokenizer, options.shows_ids)
        return self._envelope.choice(delta, key, message, logprobs)


class _ChatOutput:
    """One output so far: its thinking, text, tool calls and tokens."""

    def __init__(self, request: ChatRequest, generation: Generation, index: int) -> None:
        self.is_open = False
        self._parsed = ParsedOutput(request, generation, index)
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._total = Delta(index)

    @property
    def is_passive(self) -> bool:
        return self.is_open and self._parsed.is_passive

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        """The `delta` objects of the chunks that this delta becomes."""
        self._total.add(delta)
        parts = self._parsed.take(delta)
        for part in parts:
            self._keep(part)
        return [part.delta() for part in parts]

    def _keep(self, part: OutputPart) -> None:
        if isinstance(part, Reasoning):
            self._reasoning.append(part.text)
        elif isinstance(part, Content):
            self._content.append(part.text)
        elif isinstance(part, CallStart):
            function = {"name": part.name, "arguments": ""}
            self._calls.append({"id": part.id, "type": "function", "function": function})
        else:
            self._calls[part.index]["function"]["arguments"] += part.text

    def finish_reason(self, reason: str | None) -> str | None:
        return self._parsed.finish_reason(reason)

    def total(self) -> Delta:
        """All deltas as one."""
        self._total.finish_reason = self.finish_reason(self._total.finish_reason)
        return self._total

    def message(self) -> dict[str, Any]:
        text = "".join(self._content)
        extras: dict[str, Any] = {}
        if self._reasoning:
            extras |= Reasoning("".join(self._reasoning)).delta()
        if self._calls:
            extras["tool_calls"] = self._calls
        content = None if extras and not text else text
        return {"role": "assistant", "content": content, "refusal": None, **extras}
