"""What the log line, the trace and the bill tell of a request: recorded as it goes, read when it has ended.

Holds numbers and names, never a prompt, an image or an answer.
"""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple

from saccade.types.events import Usage

Moment = Literal["arrived", "fetch_began", "fetched", "prepared", "submitted", "ended"]


class TokenCounts(NamedTuple):
    prompt_tokens: int
    image_tokens: int  # of the prompt, with those of videos
    cached_tokens: int
    completion_tokens: int


class RequestRecord:
    """Moments are values of time.perf_counter(). One that came again is the latest."""

    def __init__(self, client: str = "") -> None:
        self.client = client  # the tenant, or the address
        self.error = ""  # code of the error response
        self.counts: TokenCounts | None = None  # None: it did not come as far as a prompt for the engine
        self.usage: Usage | None = None  # of the first output
        self._moments: dict[Moment, float] = {}
        self.mark("arrived")

    def mark(self, moment: Moment) -> None:
        self._moments[moment] = time.perf_counter()

    def mark_fetch(self, began: float, *, is_empty: bool) -> None:
        """A fetch of media that began then has ended. Of several prompts the latest counts."""
        self._moments["fetch_began"] = began
        self._moments.pop("fetched", None)
        if not is_empty:
            self.mark("fetched")

    def fail(self, code: str) -> None:
        self.error = code

    def count(self, counts: TokenCounts, usage: Usage | None) -> None:
        self.counts = counts
        self.usage = usage

    def has(self, moment: Moment) -> bool:
        return moment in self._moments

    def time_of(self, moment: Moment) -> float:
        return self._moments[moment]

    def ms_between(self, start: Moment, end: Moment) -> float:
        """0 where the end never came."""
        return (self._moments[end] - self._moments[start]) * 1e3 if end in self._moments else 0.0

    def fields(self) -> dict[str, Any]:
        """The entries of a log in JSON."""
        fields: dict[str, Any] = {"client": self.client} if self.client else {}
        if self.counts is not None:
            fields |= self.counts._asdict()
        if self.error:
            fields["error"] = self.error
        return fields

    def text(self) -> str:
        """The end of a line in a log of text."""
        text = f" from {self.client}" if self.client else ""
        if self.counts is not None:
            prompt, image, cached, completion = self.counts
            text += f": {prompt} prompt tokens ({image} of media"
            text += f", {cached} cached)" if cached else ")"
            text += f", {completion} answer tokens"
        return f"{text}; {self.error}" if self.error else text
