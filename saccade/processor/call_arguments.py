"""Arguments of `generate` and `chat` for many prompts: one for all of them, or one each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.errors import RequestError
from saccade.processor.prompt_parts import by_key
from saccade.sampling_params import SamplingParams

PromptInput = str | Mapping[str, Any]
ManyParams = SamplingParams | Sequence[SamplingParams] | None
"""One for all prompts, one for each, or the checkpoint's own."""


def as_many(prompts: Any) -> Sequence[Any]:
    """A list of prompts also where there is one."""
    return [prompts] if isinstance(prompts, (str, Mapping)) else prompts


def with_kwargs(prompt: PromptInput, kwargs: Mapping[str, Any]) -> PromptInput:
    return {"mm_processor_kwargs": kwargs, **by_key(prompt)}


def spread(params: ManyParams, count: int) -> Sequence[SamplingParams | None]:
    if isinstance(params, SamplingParams | None):
        return [params] * count
    if len(params) != count:
        counts = f"{count} prompts were given with {len(params)} sampling params"
        raise RequestError(f"{counts}; give one for all or one each")
    return params


def priorities_of(priorities: Sequence[int] | None, count: int) -> Sequence[int]:
    if priorities is None:
        return [0] * count
    if len(priorities) != count:
        raise RequestError(f"{count} prompts were given with {len(priorities)} priorities; give one for each")
    return priorities
