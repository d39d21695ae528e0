"""What callers of the offline engine get back."""

from __future__ import annotations

from dataclasses import dataclass, field

from saccade.errors import RequestError
from saccade.types import Bill, FinishReason, Logprobs


@dataclass(slots=True)
class CompletionOutput:
    """One completion: all of it, or while it is being generated what there is so far."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None  # the caller's stop token or string that ended it, if one did
    logprobs: list[Logprobs] | None = None  # one per token, when they were asked for


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]  # expanded: one entry per token the engine charges
    outputs: list[CompletionOutput]
    finished: bool
    bill: Bill | None  # None when the request was refused before it could be priced
    error: RequestError | None = None  # why it was refused or failed; other requests go on
    num_cached_tokens: int = field(default=0)
