"""POST /v1/completions: runs text or token prompts and writes their outputs as OpenAI's choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from saccade.server.api.chunks import DONE, Envelope
from saccade.server.api.events import Event, EventShape
from saccade.server.api.logprobs import completion_logprobs, prompt_body
from saccade.server.generation import Delta, Generation
from saccade.server.http.request_context import Exchange
from saccade.server.pipeline import prepare_prompts, read_request, running, send_answer
from saccade.server.request.chat import CompletionRequest, read_completion
from saccade.server.service import Service
from saccade.types.step import Logprobs


async def create_completion(service: Service, exchange: Exchange) -> None:
    request = await read_request(service, read_completion, exchange, service.options.max_num_seqs)
    options = request.response_options
    service.check_model(options.model)
    exchange.lease.enter(len(request.prompts) * options.params.num_outputs)
    prompts = await prepare_prompts(service, request, exchange.caller)
    async with running(service, prompts, options, exchange) as generation:
        exchange.lease.release()
        shape = CompletionEvents(service, request, exchange.caller.request_id, generation)
        await send_answer(service, exchange, generation, shape, stream=options.stream)


class CompletionEvents(EventShape):
    end_marker = DONE

    def __init__(
        self, service: Service, request: CompletionRequest, request_id: str, generation: Generation
    ) -> None:
        options = request.response_options
        self._options = options
        self._tokenizer = service.processor.tokenizer
        self._totals = [Delta(index) for index in range(len(generation.outputs))]  # each output so far
        echoes = self._echoed(request, generation) if request.echo else []
        self._echoes = dict(enumerate(echoes))  # by output, until it begins
        self._envelope = Envelope("cmpl", request_id, service.names[0], options, generation)
        self._generation = generation
        self._is_echoed = request.echo
        self._is_prompt_only = request.is_prompt_only
        self.is_large = options.params.prompt_logprobs is not None

    def take(self, delta: Delta) -> Iterator[Event]:
        total = self._totals[delta.index]
        if self._is_prompt_only:
            delta = Delta(delta.index, finish_reason="length")
        begins = delta.index in self._echoes
        delta.text = self._echoes.pop(delta.index, "") + delta.text
        if self._options.stream and any((delta.text, delta.finish_reason, delta.logprobs)):
            choice = self._choice(delta, len(total.text), shows_prompt=begins)
            yield self._envelope.chunk("text_completion", choice)
        total.add(delta)

    def _echoed(self, request: CompletionRequest, generation: Generation) -> list[str]:
        """The prompt of each output, as the client wrote it."""
        pairs = zip(request.prompts, generation.prompt_ids, strict=True)
        decode = self._tokenizer.decode
        texts = [prompt if isinstance(prompt, str) else decode(list(ids)) for prompt, ids in pairs]
        return [text for text in texts for _ in range(generation.per_prompt)]

    def end(self) -> Iterator[Event]:
        return self._envelope.last_chunk("text_completion")

    def whole(self) -> dict[str, Any]:
        best = [self._totals[index] for index in self._generation.best(self._options.params.n)]
        choices = [self._whole_choice(total) | {"index": index} for index, total in enumerate(best)]
        body = self._envelope.whole("text_completion", choices)
        if self._is_prompt_only:
            body["usage"] |= {"completion_tokens": 0, "total_tokens": body["usage"]["prompt_tokens"]}
        return body

    def _whole_choice(self, total: Delta) -> dict[str, Any]:
        choice = self._choice(total, 0, shows_prompt=self._is_echoed)
        count = self._options.prompt_logprobs
        if count is not None:
            entries = self._generation.prompt_logprobs(total.index, count)
            ids = self._generation.prompt_ids_of(total.index)
            choice["prompt_logprobs"] = prompt_body(ids, entries, self._tokenizer)
        return choice

    def _choice(self, delta: Delta, offset: int, *, shows_prompt: bool) -> dict[str, Any]:
        """`offset`: where the delta begins in the text of its output, prompt and all."""
        options = self._options
        count = options.params.logprobs
        logprobs = None
        if count is not None:
            ids: Sequence[int] = delta.shown_ids
            entries: Sequence[Logprobs | None] = delta.logprobs
            if shows_prompt:
                ids = [*self._generation.prompt_ids_of(delta.index), *ids]
                entries = [None, *self._generation.prompt_logprobs(delta.index, count), *entries]
            logprobs = completion_logprobs(ids, entries, self._tokenizer, offset, options.shows_ids)
        return self._envelope.choice(delta, "text", delta.text, logprobs)
