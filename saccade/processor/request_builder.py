"""Builds the engine's requests: the `n` outputs of one prompt share all but their ids and seeds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from saccade.sampling_params import SamplingParams
from saccade.structured.schema_validation import check_structured
from saccade.structured.structured_outputs import structured_of
from saccade.types import NO_TENANT, Prompt, Request, Tenant, Thinking


class RequestBuilder:
    def __init__(
        self,
        eos_token_ids: frozenset[int],
        seed: int | None,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        """`encode`: text to tokens without special ones, for bad words."""
        self._eos_token_ids = eos_token_ids
        self._encode = encode
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
        """`first`: number of the first output, where a request has several prompts."""
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(62)
        if params.bad_words and self._encode is not None:
            params = replace(params, bad_words=None, bad_words_token_ids=self._bad_words(params.bad_words))
        eos_token_ids = frozenset[int]() if params.ignore_eos else self._eos_token_ids
        return [
            Request(
                request_id=child_id(request_id, first + index),
                prompt=prompt,
                params=params,
                max_tokens=max_tokens,
                eos_token_ids=eos_token_ids,
                seed=(seed + index) % 2**63,
                tenant=tenant,
                priority=priority,
                thinking=thinking if params.structured is not None else None,
            )
            for index in range(params.n)
        ]

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it begins a text, and as it follows a space: most vocabularies spell these apart."""
        assert self._encode is not None
        spelled = [self._encode(space + word.strip()) for word in words for space in ("", " ")]
        return tuple(dict.fromkeys(tuple(ids) for ids in spelled if ids))


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
