"""Arguments of `generate` and `chat` for many prompts: one for all of them, or one each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.errors import RequestError
from saccade.sampling_params import SamplingParams

PromptInput = str | Mapping[str, Any]
ManyParams = SamplingParams | Sequence[SamplingParams] | None
"""One for all prompts, one for each, or the checkpoint's own."""


def with_kwargs(prompt: PromptInput, kwargs: Mapping[str, Any]) -> PromptInput:
    given = {"prompt": prompt} if isinstance(prompt, str) else prompt
    return {"mm_processor_kwargs": kwargs, **given}


def spread(given: ManyParams, count: int) -> Sequence[SamplingParams | None]:
    if given is None or isinstance(given, SamplingParams):
        return [given] * count
    if len(given) != count:
        counts = f"{count} prompts were given with {len(given)} sampling params"
        raise RequestError(f"{counts}; give one for all or one each")
    return given


def priorities_of(given: Sequence[int] | None, count: int) -> Sequence[int]:
    if given is None:
        return [0] * count
    if len(given) != count:
        raise RequestError(f"{count} prompts were given with {len(given)} priorities; give one for each")
    return given
