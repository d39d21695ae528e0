"""Builds the engine's requests: the outputs of one prompt share all but their ids and seeds.

The first also computes the log probabilities of the prompt, where they are asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from saccade.errors import RequestError
from saccade.sampling_params import SamplingParams
from saccade.structured.schema_validation import check_structured
from saccade.structured.structured_outputs import structured_of
from saccade.types.prompt import Prompt
from saccade.types.request import NO_TENANT, Request, Tenant, Thinking


class RequestBuilder:
    def __init__(
        self,
        eos_token_ids: frozenset[int],
        seed: int | None,
        encode: Callable[[str], list[int]] | None = None,
        thinking_after: Callable[[Prompt], Thinking | None] | None = None,
    ) -> None:
        """`encode`: text to tokens without special ones, for bad words.

        `thinking_after`: how outputs of a prompt may think, for a budget.
        """
        self._eos_token_ids = eos_token_ids
        self._encode = encode
        self._thinking_after = thinking_after
        self._seeds = random.Random(seed)  # for requests that bring none

    def build(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        max_tokens: int,
        *,
        first: int = 0,
        tenant: Tenant = NO_TENANT,
        priority: int = 0,
        thinking: Thinking | None = None,
    ) -> list[Request]:
        """`first`: number of the first output, where a request has several prompts.

        `thinking`: how outputs may begin, if they are held to a structure after it.
        """
        has_budget = params.thinking_token_budget is not None
        if has_budget and thinking is None and self._thinking_after is not None:
            thinking = self._thinking_after(prompt)
        params = _with_budget(params, thinking)
        seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
        if params.bad_words and self._encode is not None:
            params = replace(params, bad_words=None, bad_words_token_ids=self._bad_words(params.bad_words))
        if params.picks_best and params.logprobs is None:
            params = replace(params, logprobs=0)  # by which outputs are compared
        child_params = params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
        is_held = params.structured is not None or has_budget
        eos_token_ids = frozenset[int]() if params.ignore_eos else self._eos_token_ids
        prompt = _owned(prompt, request_id, tenant.name)
        return [
            Request(
                request_id=child_id(request_id, first + index),
                prompt=prompt,
                params=child_params if index else params,
                max_tokens=max_tokens,
                eos_token_ids=eos_token_ids,
                seed=(seed + index) % 2**63,
                tenant=tenant,
                priority=priority,
                thinking=thinking if is_held else None,
            )
            for index in range(params.num_outputs)
        ]

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it begins a text, and as it follows a space: most vocabularies spell these apart."""
        assert self._encode is not None
        spelled = [self._encode(space + word.strip()) for word in words for space in ("", " ")]
        return tuple(dict.fromkeys(tuple(ids) for ids in spelled if ids))


def _with_budget(params: SamplingParams, thinking: Thinking | None) -> SamplingParams:
    """Drop the budget where there is no thinking. RequestError if thinking cannot be closed."""
    if params.thinking_token_budget is None:
        return params
    if thinking is None:
        return replace(params, thinking_token_budget=None)
    if thinking.close_id is None:
        name = "thinking_token_budget"
        reason = f"{thinking.close} is not one token of this model, so its thinking cannot be closed"
        raise RequestError(f"{name} is not supported: {reason}; leave it out", code="unsupported", param=name)
    return params


def _owned(prompt: Prompt, owner: str, client: str) -> Prompt:
    if not prompt.items:
        return prompt
    # A repeated one stays one object.
    items = {item.key: replace(item, owner=owner, client=client) for item in prompt.items}
    return replace(prompt, items=tuple(items[item.key] for item in prompt.items))


def child_id(request_id: str, index: int) -> str:
    """How the engine calls one output of a request. `Request.family` is the reverse."""
    return f"{request_id}/{index}"


def with_structure(params: SamplingParams) -> SamplingParams:
    """Parameters with their structure as text, checked."""
    if params.structured_outputs is not None:
        return replace(params, structured=structured_of(params.structured_outputs), structured_outputs=None)
    if params.structured is not None:
        check_structured(params.structured)
    return params
