"""POST /v1/completions: runs text or token prompts and writes their outputs as OpenAI's choices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from saccade.server.api.chunks import DONE, Envelope
from saccade.server.api.events import Event, EventShape, send_events
from saccade.server.api.logprobs import completion_logprobs
from saccade.server.generation import Delta, Generation
from saccade.server.http.request_context import Exchange
from saccade.server.request.chat import CompletionRequest, read_completion, renaming
from saccade.server.service import Service


async def create_completion(service: Service, exchange: Exchange) -> None:
    request = await service.read(read_completion, exchange, service.options.max_num_seqs)
    options = request.response_options
    service.check_model(options.model)
    exchange.lease.enter(len(request.prompts) * options.params.n)
    prompts, timing = await service.prepare_prompts(request, exchange.caller)
    with service.generation(prompts, options, timing) as generation:
        await service.start(generation, prompts, options, exchange.caller)
        exchange.lease.release()
        shape = CompletionEvents(service, request, exchange.caller.request_id, generation)
        with renaming({"response_format": options.structure_field}.get):
            await send_events(exchange.writer, generation, shape, stream=options.stream)


class CompletionEvents(EventShape):
    end_marker = DONE

    def __init__(
        self, service: Service, request: CompletionRequest, request_id: str, generation: Generation
    ) -> None:
        options = request.response_options
        self._options = options
        self._tokenizer = service.processor.tokenizer
        self._totals = [Delta(index) for index in range(len(generation.outputs))]  # each output so far
        self._echoes = self._echoed(request, generation) if request.echo else []
        response_id = f"cmpl-{options.request_id or request_id}"
        self._envelope = Envelope(response_id, service.names[0], options, generation)

    def take(self, delta: Delta) -> Iterator[Event]:
        total = self._totals[delta.index]
        if self._echoes and not total.text:
            delta.text = self._echoes[delta.index] + delta.text
        if delta.text or delta.finish_reason or delta.logprobs:
            yield self._envelope.chunk("text_completion", self._choice(delta, offset=len(total.text)))
        total.add(delta)

    def _echoed(self, request: CompletionRequest, generation: Generation) -> list[str]:
        """The prompt of each output, as the client wrote it."""
        pairs = zip(request.prompts, generation.prompt_ids, strict=True)
        decode = self._tokenizer.decode
        texts = [prompt if isinstance(prompt, str) else decode(list(ids)) for prompt, ids in pairs]
        return [text for text in texts for _ in range(request.response_options.params.n)]

    def end(self) -> Iterator[Event]:
        return self._envelope.last_chunk("text_completion")

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(total, offset=0) for total in self._totals]
        return self._envelope.whole("text_completion", choices)

    def _choice(self, delta: Delta, offset: int) -> dict[str, Any]:
        """`offset` is where the delta begins in the text of its output."""
        options = self._options
        logprobs = None
        if options.params.logprobs is not None:
            ids = delta.shown_ids
            logprobs = completion_logprobs(ids, delta.logprobs, self._tokenizer, offset, options.shows_ids)
        return self._envelope.choice(delta, "text", delta.text, logprobs)
