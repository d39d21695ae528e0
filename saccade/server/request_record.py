"""What the log line and the trace tell of a request: filled in as it goes, read when it has ended.

Holds numbers and names, never a prompt, an image or an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from saccade.types.events import Usage


@dataclass(slots=True)
class RequestRecord:
    """Moments are values of time.perf_counter()."""

    client: str = ""  # the tenant, or the address
    fetch_began: float = 0.0
    fetch_ended: float = 0.0  # 0: nothing was fetched
    submitted: float = 0.0  # to the engine; 0: never
    has_outputs: bool = False  # it came as far as a prompt for the engine
    prompt_tokens: int = 0
    image_tokens: int = 0  # of the prompt, with those of videos
    cached_tokens: int = 0
    completion_tokens: int = 0
    usage: Usage | None = None  # of the first output
    error: str = ""  # code of the error response

    def fields(self) -> dict[str, Any]:
        """For a log in JSON."""
        tokens = {
            "prompt_tokens": self.prompt_tokens,
            "image_tokens": self.image_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
        }
        return {
            **({"client": self.client} if self.client else {}),
            **(tokens if self.has_outputs else {}),
            **({"error": self.error} if self.error else {}),
        }

    def text(self) -> str:
        """For a log in text."""
        text = f" from {self.client}" if self.client else ""
        if self.has_outputs:
            cached = f", {self.cached_tokens} cached" if self.cached_tokens else ""
            text += f": {self.prompt_tokens} prompt tokens ({self.image_tokens} of media{cached})"
            text += f", {self.completion_tokens} answer tokens"
        return text + (f"; {self.error}" if self.error else "")
