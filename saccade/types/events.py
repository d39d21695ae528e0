"""What a request hears after a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from saccade.errors import RequestError
from saccade.types.media import Key
from saccade.types.step import Logprobs

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenEvent(NamedTuple):
    """One request's news after a step. The last one has a finish reason."""

    request_id: str
    token_id: int | None  # None in a terminal event without a token
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    stop_token_id: int | None = None  # which token ended it, when one did
    error: RequestError | None = None
    usage: Usage | None = None  # with the terminal event
    pooled: bytes | None = None  # see `Sample`; then it is the only event
    prompt_logprobs: bytes | None = None  # see `Sample`

    @staticmethod
    def going_on(
        request_id: str, token_id: int, logprobs: Logprobs | None, prompt_logprobs: bytes | None
    ) -> TokenEvent:
        """A token that does not end its request. As TokenEvent(...), in less time: a step makes many."""
        # None: finish_reason, stop_token_id, error, usage, pooled
        event = (request_id, token_id, logprobs, None, None, None, None, None, prompt_logprobs)
        return tuple.__new__(TokenEvent, event)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a finished request consumed. Times are seconds on the engine's clock."""

    cached_tokens: int  # prompt tokens that came from the prefix cache when it first ran
    num_preemptions: int
    arrived: float
    first_scheduled: float | None
    first_token: float | None
    finished: float
    decode_ms: float  # image decoding done for this request (0 when its images were resident)
    encode_ms: float
    ahead_ms: float = 0.0  # the part of both that was done before its first step, while it waited
    encoded: tuple[Key, ...] = ()  # images decoded and encoded for it; the others were cached

    def times_ms(self) -> dict[str, float]:
        """Time to first token in parts that add up to it: queue, decode, encode, prefill.

        A moment counts once: image decoding and encoding are taken out of the queue or prefill time in which
        they happened. Images decoded in parallel make the sum a little larger than the elapsed time.
        """
        times = {"decode": self.decode_ms, "encode": self.encode_ms}
        if self.first_scheduled is not None:
            times["queue"] = max(0.0, (self.first_scheduled - self.arrived) * 1e3 - self.ahead_ms)
            if self.first_token is not None:
                computed = (self.first_token - self.first_scheduled) * 1e3
                times["prefill"] = max(0.0, computed - (self.decode_ms + self.encode_ms - self.ahead_ms))
                times["first_token"] = (self.first_token - self.arrived) * 1e3
        return {**times, "total": (self.finished - self.arrived) * 1e3}
