"""The step loop for a device that computes by itself: while it works on a step, the host deals with the last one.

    host     | collect 1, plan 2, launch 2 | text of 1 | collect 2, plan 3, launch 3 | text of 2 | ...
    device         idle for a moment       | ---------- step 2 ----------            | ------ step 3

Where all requests decode, the next step is planned and launched before the tokens of this one are known, and the
device is never idle:

    host     | launch 3, collect 2, text of 2 | launch 4, collect 3, text of 3 | ...
    device   | - step 2 - | --- step 3 --- | --- step 4 --- | ...

`EngineCore` is the plain loop: the same tokens, one step at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from saccade.engine.core import EngineCore, StepRunner
from saccade.types import StepPlan, StepResult, TokenEvent


class LaunchingRunner(StepRunner, Protocol):
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]: ...


class _Launched(NamedTuple):
    plan: StepPlan
    at: float
    collect: Callable[[], StepResult]


class OverlappedCore(EngineCore):
    """`step` launches the next step, books the one that was under way, and returns what the booked one brought."""

    runner: LaunchingRunner

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._launched: _Launched | None = None
        self._events: list[TokenEvent] = []  # booked between two steps

    def step(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        under_way, self._launched = self._launched, None
        if under_way is not None:
            ahead = self.scheduler.schedule_ahead()
            if ahead and (endings := self._launch(ahead)):
                return events + endings  # nobody asks for the tokens of the step under way any more
            events += self._book(under_way)
        if self._launched is None and self.scheduler.has_unfinished():
            events += self._launch(self.scheduler.schedule(self.clock()))
        return events

    def abort(self, request_id: str) -> TokenEvent | None:
        """Waits for the step under way: what it computed for the request must be known before its blocks are free."""
        if self._launched is not None:
            under_way, self._launched = self._launched, None
            self._events += self._book(under_way)
        return super().abort(request_id)

    def has_unfinished(self) -> bool:
        return bool(self._launched or self._events) or self.scheduler.has_unfinished()

    def _launch(self, plan: StepPlan) -> list[TokenEvent]:
        """Nothing, or the endings of all requests when the step could not be launched."""
        try:
            self._launched = _Launched(plan, self.clock(), self.runner.launch(plan))
        except BaseException as error:
            return self._failed(plan, error)
        return []

    def _book(self, launched: _Launched) -> list[TokenEvent]:
        try:
            return self._commit(launched.plan, launched.collect(), launched.at)
        except BaseException as error:
            return self._failed(launched.plan, error)

    def _failed(self, plan: StepPlan, error: BaseException) -> list[TokenEvent]:
        """All requests have ended, those of a step launched ahead too: nobody asks for its tokens."""
        self._launched = None
        events = self._fail_step(plan)
        if not isinstance(error, Exception):
            raise error
        return events
