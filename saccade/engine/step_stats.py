"""What the latest steps did, for the engine page and its API. Sees plans and results; decides nothing."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from saccade.types.media import Key
from saccade.types.prompt import Span
from saccade.types.step import ScheduledWindow, StepPlan, StepResult

NUM_KEPT = 64


class StepRecord(NamedTuple):
    """What one step did."""

    step: int
    decode_tokens: int
    text_tokens: int  # of prefill; after a preemption generated tokens are prefilled too
    image_tokens: int  # prompt positions of images
    encodes: int  # images that were in the encoder
    ms: float


class StepTrace:
    """A ring of records. A step costs a look at the spans of requests that prefill."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=NUM_KEPT)
        self._spans: dict[str, tuple[Span, ...]] = {}  # by request
        self._encoding: set[Key] = set()  # given to the encoder, neither resident nor failed yet

    def record(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        self._follow(plan)
        total = sum(window.end - window.start for window in plan.prefill)
        image = sum(_image_tokens(window, self._spans[window.request_id]) for window in plan.prefill)
        encodes = len(self._encoding) if plan.encode_layers != 0 else 0
        ms = round(seconds * 1e3, 3)
        self._records.append(StepRecord(plan.step, len(plan.decode), total - image, image, encodes, ms))
        self._encoding.difference_update(result.encoded, result.failed)

    def recent(self) -> list[dict[str, Any]]:
        """The oldest first, in plain values: they travel to other processes as they are."""
        return [record._asdict() for record in self._records]

    def reset(self) -> None:
        """A step broke and all requests ended; what was recorded stays true."""
        self._spans.clear()
        self._encoding.clear()

    def _follow(self, plan: StepPlan) -> None:
        for request_id in plan.freed_requests:
            self._spans.pop(request_id, None)
        for admission in plan.admitted:
            self._spans[admission.request.request_id] = admission.request.prompt.spans
        self._encoding.update(item.key for item in plan.encode)


def _image_tokens(work: ScheduledWindow, spans: tuple[Span, ...]) -> int:
    return sum(max(0, min(work.end, span.end) - max(work.start, span.start)) for span in spans)
