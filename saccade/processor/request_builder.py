"""Builds the engine's requests: the `n` outputs of one prompt share all but their ids and seeds."""

from __future__ import annotations

import random

from saccade.sampling_params import SamplingParams
from saccade.types import NO_TENANT, Prompt, Request, Tenant, Thinking


class RequestBuilder:
    def __init__(self, eos_token_ids: frozenset[int], seed: int | None) -> None:
        self._eos_token_ids = eos_token_ids
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


def child_id(request_id: str, index: int) -> str:
    """How the engine calls one output of a request. `Request.family` is the reverse."""
    return f"{request_id}/{index}"
