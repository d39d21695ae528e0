"""The events of an output, put together as a client does."""

from __future__ import annotations

import json
from typing import Any

from saccade.processor.dialects.events import (
    CallArguments,
    CallProblem,
    CallStart,
    Content,
    OutputEvent,
    Reasoning,
)


class Seen:
    """What a client has after the last event."""

    def __init__(self, events: list[OutputEvent]) -> None:
        self.reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        self.content = "".join(event.text for event in events if isinstance(event, Content))
        self.problems = [event.reason for event in events if isinstance(event, CallProblem)]
        starts = [event for event in events if isinstance(event, CallStart)]
        assert [start.index for start in starts] == list(range(len(starts)))
        assert len({start.id for start in starts}) == len(starts)
        pieces = ["" for _ in starts]
        known = 0
        for event in events:
            known += isinstance(event, CallStart)
            if isinstance(event, CallArguments):
                assert event.index == known - 1, "arguments belong to the last call"
                pieces[event.index] += event.text
        self.raw = [(start.name, text) for start, text in zip(starts, pieces, strict=True)]

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(text)) for name, text in self.raw]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seen) and vars(self) == vars(other)
