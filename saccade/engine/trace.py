"""What the latest steps did, kept for whoever watches. Sees plans and results; decides nothing, keeps no picture."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from saccade.types import Key, ScheduledWindow, Span, StepPlan, StepResult

NUM_KEPT = 64


class StepRecord(NamedTuple):
    """What one step did, for whoever watches the engine."""

    step: int
    decode_tokens: int  # windows of one at the end of an answer
    text_tokens: int  # computed again after a preemption: an answer's tokens count as text too
    image_tokens: int  # prompt positions of pictures
    encodes: int  # pictures that were in the encoder
    ms: float


class _Known(NamedTuple):
    """What has to be known of a request to tell the tokens of its windows apart."""

    num_prompt: int
    spans: tuple[Span, ...]


class StepTrace:
    """A ring of records. One step costs a lookup per window, unless it was planned ahead, and a look at the spans of
    those that prefill.
    """

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=NUM_KEPT)
        self._requests: dict[str, _Known] = {}
        self._encoding: set[Key] = set()  # given to the encoder, neither resident nor failed yet

    def record(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        self._follow(plan)
        decode, text, image = (len(plan.windows), 0, 0) if plan.is_ahead else self._counts(plan.windows)
        encodes = len(self._encoding) if plan.encode_layers != 0 else 0
        self._records.append(StepRecord(plan.step, decode, text, image, encodes, round(seconds * 1e3, 3)))
        self._encoding.difference_update(result.encoded, result.failed)

    def _counts(self, windows: Sequence[ScheduledWindow]) -> tuple[int, int, int]:
        """Tokens of answers, of text and of pictures."""
        decode = text = image = 0
        for work in windows:
            known, size = self._requests[work.request_id], work.end - work.start
            if size == 1 and work.start >= known.num_prompt:
                decode += 1
                continue
            covered = _image_tokens(work, known.spans)
            image += covered
            text += size - covered
        return decode, text, image

    def recent(self) -> list[dict[str, Any]]:
        """The oldest first, in plain values: they travel to other processes as they are."""
        return [record._asdict() for record in self._records]

    def reset(self) -> None:
        """A step broke and all requests ended; what was recorded stays true."""
        self._requests.clear()
        self._encoding.clear()

    def _follow(self, plan: StepPlan) -> None:
        for request_id in plan.freed_requests:
            self._requests.pop(request_id, None)
        for admission in plan.admitted:
            prompt = admission.request.prompt
            self._requests[admission.request.request_id] = _Known(len(prompt), prompt.spans)
        self._encoding.update(item.key for item in plan.encode)


def _image_tokens(work: ScheduledWindow, spans: tuple[Span, ...]) -> int:
    return sum(max(0, min(work.end, span.end) - max(work.start, span.start)) for span in spans)
