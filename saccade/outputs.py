"""What callers of the offline engine get back."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Generic, NamedTuple, TypeVar

from saccade.errors import RequestError
from saccade.types.bill import Bill
from saccade.types.events import FinishReason
from saccade.types.step import Logprobs


class Logprob(NamedTuple):
    """Of one token at one position, as in vLLM."""

    logprob: float
    rank: int  # 1 is the most likely token
    decoded_token: str


class TokenLogprobs(dict[int, Logprob]):
    """Of one position, by token id: the sampled token first, then the most likely ones."""

    def __init__(self, token_id: int, entry: Logprobs, decode: Callable[[int], str]) -> None:
        super().__init__({token_id: Logprob(entry.logprob, entry.rank, decode(token_id))})
        for rank, (other, value) in enumerate(entry.top, start=1):
            self.setdefault(other, Logprob(value, rank, decode(other)))
        self.logprob = entry.logprob  # of the sampled token
        self.rank = entry.rank
        self.top = entry.top  # (token id, log probability), most likely first


PromptLogprobs = list[TokenLogprobs | None]
"""Of each token of a prompt, given those before it. None for the first."""


def unpack_prompt_logprobs(packed: bytes, count: int) -> list[Logprobs]:
    """Those of a prompt's tokens from the second on, as the engine sends them: four bytes a value.

    | log probability | rank |  `count` most likely tokens  |  their log probabilities  |    for each
    """
    entries = []
    for logprob, rank, *top in struct.iter_unpack(f"=fi{count}i{count}f", packed):
        entries.append(Logprobs(logprob, rank, tuple(zip(top[:count], top[count:], strict=True))))
    return entries


def prompt_logprobs(
    token_ids: Sequence[int], entries: Sequence[Logprobs], decode: Callable[[int], str]
) -> PromptLogprobs:
    decode = cache(decode)  # the same tokens come again and again
    pairs = zip(token_ids[1:], entries, strict=True)
    return [None, *(TokenLogprobs(token_id, entry, decode) for token_id, entry in pairs)]


@dataclass(slots=True)
class CompletionOutput:
    """One completion: all of it, or while it is being generated what there is so far."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None  # the caller's stop token or string that ended it, if one did
    logprobs: list[TokenLogprobs] | None = None  # one per token, when they were asked for
    pooled: bytes | None = None  # float32, of `embed` and `score`
    reasoning: str | None = None  # the thinking before the answer, without its markers; None: there is none
    content: str = ""  # the text without the thinking

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over all tokens; None where `logprobs` were not asked for."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


class BeamSearchSequence(NamedTuple):
    """One of the best continuations that a beam search found."""

    tokens: list[int]  # the prompt's, then its own
    text: str  # of its own tokens
    cum_logprob: float
    finish_reason: FinishReason


class BeamSearchOutput(NamedTuple):
    sequences: list[BeamSearchSequence]  # best first


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
    prompt_logprobs: PromptLogprobs | None = None  # one per prompt token, when they were asked for


class EmbeddingOutput(NamedTuple):
    embedding: list[float] | list[list[float]]  # of length 1; of late interaction one such list a token


class ScoringOutput(NamedTuple):
    score: float


Pooled = TypeVar("Pooled", EmbeddingOutput, ScoringOutput)


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Pooled]):
    """What `embed` and `score` return for each input or pair."""

    request_id: str
    outputs: Pooled | None  # None with an error
    prompt_token_ids: list[int]
    finished: bool
    bill: Bill | None
    error: RequestError | None = None
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, request: RequestOutput, outputs: Pooled | None) -> PoolingRequestOutput[Pooled]:
        ids = request.prompt_token_ids
        facts = (ids, True, request.bill, request.error, request.num_cached_tokens)
        return cls(request.request_id, outputs, *facts)
