"""POST /v1/completions: plain prompts and the shape of their answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from saccade.processor.tokenizer import Tokenizer
from saccade.server.api.chunks import deliver
from saccade.server.api.logprobs import completion_logprobs
from saccade.server.generation import Delta, Generation
from saccade.server.http.caller import Caller
from saccade.server.http.limits import ByteLease, Upload
from saccade.server.http.response import ResponseWriter
from saccade.server.request.chat import ResponseOptions, read_completion
from saccade.server.service import Service
from saccade.types import Logprobs


async def answer_completion(
    service: Service, writer: ResponseWriter, upload: Upload, caller: Caller, lease: ByteLease
) -> None:
    request = await service.read(read_completion, await service.decode(upload), caller, service.options.max_num_seqs)
    response_options = request.response_options
    service.check_model(response_options.model)
    lease.enter(len(request.prompts) * response_options.params.n)
    prompts, timing = await service.price_prompts(request.prompts, response_options, caller)
    with service.generation(prompts, response_options, timing) as generation:
        await service.start(generation, prompts, response_options, caller.request_id)
        lease.release()
        shape = _CompletionShape(service, response_options, caller.request_id, generation)
        await deliver(writer, generation, shape, response_options)


class _CompletionShape:
    def __init__(
        self, service: Service, response_options: ResponseOptions, request_id: str, generation: Generation
    ) -> None:
        self._tokenizer: Tokenizer = service.processor.tokenizer
        self._wanted = response_options
        self._answers = generation.answers
        self._shown = [0] * len(generation.answers)  # characters of each answer that are out
        self._ids: list[list[int]] = [[] for _ in generation.answers]  # without the tokens that ended them
        self._logprobs: list[list[Logprobs]] = [[] for _ in generation.answers]
        shown = response_options.request_id or request_id
        self._common = {"id": f"cmpl-{shown}", "created": int(time.time()), "model": service.names[0]}

    def base(self, *, is_chunk: bool) -> dict[str, Any]:
        return {**self._common, "object": "text_completion"}

    def chunks(self, piece: Delta) -> Iterator[dict[str, Any]]:
        index = piece.index
        self._ids[index] += piece.shown_ids
        self._logprobs[index] += piece.logprobs
        if piece.text or piece.finish_reason or piece.logprobs:
            choice = self._choice(piece, self._listed(piece.shown_ids, piece.logprobs, self._shown[index]))
            yield choice
        self._shown[index] += len(piece.text)

    def choices(self) -> list[dict[str, Any]]:
        whole = []
        for answer in self._answers:
            piece = Delta(answer.index, answer.text, answer.token_ids)
            piece.finish_reason, piece.stop_reason = answer.finish_reason, answer.stop_reason
            listed = self._listed(self._ids[answer.index], self._logprobs[answer.index], 0)
            whole.append(self._choice(piece, listed))
        return whole

    def _listed(self, ids: list[int], logprobs: list[Logprobs], offset: int) -> dict[str, Any] | None:
        if self._wanted.params.logprobs is None:
            return None
        return completion_logprobs(ids, logprobs, self._tokenizer, offset, self._wanted.shows_ids)

    def _choice(self, piece: Delta, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        choice = {
            "index": piece.index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        return choice | ({"token_ids": piece.token_ids} if self._wanted.return_token_ids else {})
