"""The step loop for a device that computes by itself: while it works on a step, the host deals with the last one.

    host     | collect 1, plan 2, launch 2 | text of 1 | collect 2, plan 3, launch 3 | text of 2 | ...
    device         idle for a moment       | ---------- step 2 ----------            | ------ step 3

Where the device chooses tokens by itself, the next decode step is planned and launched before those of this one are
known. What else is to be done is planned and launched while a decode step runs, and asked for when the next one does,
so that tokens wait neither for prompts nor for pictures. The device is never idle:

    host     | collect the rest of 1, plan and launch the rest of 2 and decode 3, collect decode 2, text of 2 | ...
    device   | ---- decode 2 ---- | ---- the rest of 2 ---- | ---- decode 3 ---- | ...

Where no prompt ends in the rest of 2, the device may compute it together with decode 3, which reads the weights once.

`EngineCore` is the plain loop: the same tokens, one step at a time.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from saccade.engine.core import EngineCore, StepRunner
from saccade.engine.gc_control import freeze
from saccade.types import Collect, Key, MediaItem, Request, StepPlan, TokenEvent

_TURN = 5e-5  # seconds; Python's own 5 ms are several steps
_REMEMBERED = 512  # pictures, by their keys


class LaunchingRunner(StepRunner, Protocol):
    def launch(self, plan: StepPlan) -> Collect: ...

    def launch_both(self, beside: StepPlan, ahead: StepPlan) -> tuple[Collect, Collect]:
        """In this order, or together."""

    def decode_early(self, items: Sequence[MediaItem]) -> None:
        """Pictures that steps to come will want: they are decoded beside whatever the host and the device do."""


class _Launched(NamedTuple):
    plan: StepPlan
    at: float
    collect: Collect


class AsyncEngineCore(EngineCore):
    """`step` launches the next step, books the one that was under way, and returns what the booked one brought."""

    runner: LaunchingRunner

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._launched: list[_Launched] = []  # in the order of the device
        self._is_ahead = False  # the last one was planned ahead, and nothing beside it yet
        self._events: list[TokenEvent] = []  # booked between two steps
        self._seen: OrderedDict[Key, None] = OrderedDict()  # pictures that came lately
        freeze()
        # Whoever gives up the interpreter for a launch waits this long until a thread that decodes pictures returns it.
        sys.setswitchinterval(_TURN)

    def step(self) -> list[TokenEvent]:
        with self._atomic():
            return self._step()

    def _step(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        if self._launched and self._launched[0].plan.is_beside:
            events += self._commit_finished(1)
        beside = self._plan_beside() if self._is_ahead else None
        ahead = self.scheduler.schedule_async_decode() if self._launched else None
        self._is_ahead = ahead is not None
        events += self._launch(beside, ahead)
        if self._launched:
            self.scheduler.index()  # nothing is left to launch: the device works, and its tokens are waited for
            events += self._commit_finished(1 if self._is_ahead else len(self._launched))
        if not self._launched and self.scheduler.has_unfinished() and not (events and self._is_long()):
            events += self._launch(self._plan(self.clock()))
        return events

    def _plan_beside(self) -> StepPlan | None:
        self._hold()
        return self.scheduler.schedule_async_prefill(self.clock())

    def _is_long(self) -> bool:
        """Whether launching the next step may take many times what a token does: then nobody's last one waits for it.

        Beside answers steps are short. Without any, whole pictures go in.
        """
        return self.scheduler.encoder_pacing.latency_bounded and not self.scheduler.has_answers

    def add(self, request: Request) -> None:
        """Waits for what is under way where it computes for an earlier request of this id, which has ended."""
        if any(work.request_id == request.request_id for launched in self._launched for work in launched.plan.windows):
            self._drain()
        super().add(request)
        try:
            if missing := self.scheduler.missing(request.request_id):
                self.runner.decode_early(missing)
        except BaseException:  # interrupted: nobody will hear that it was added
            super().abort(request.request_id)
            raise

    def prefetch_media(self, items: Sequence[MediaItem]) -> None:
        """Where nobody else waits, the first that is new is decoded while the rest of its prompt is made.

        Of one that came before, a cache may have all that is needed: only the whole prompt will tell.
        """
        new = [i for i in items if i.key not in self._seen and not self.scheduler.has_image(i.key)]
        for item in items:
            self._seen[item.key] = None
            self._seen.move_to_end(item.key)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        if new and not self.has_unfinished():
            self.runner.decode_early(new[:1])

    def launch_if_full(self) -> None:
        """Launch a step that is full: the device works on it while others are added, who would not come into it."""
        if not self._launched and self.scheduler.fills_step():
            with self._atomic():
                self._events += self._launch(self._plan(self.clock()))

    def abort(self, request_id: str) -> TokenEvent | None:
        """Waits for what is under way: what it computed for the request must be known before its blocks are free.

        The event that is returned is the request's last one, also where it has just ended by itself.
        """
        self._drain()
        told = [event for event in self._events if event.request_id == request_id]
        self._events = [event for event in self._events if event.request_id != request_id]
        return super().abort(request_id) or next((event for event in told if event.finish_reason), None)

    @contextmanager
    def _atomic(self) -> Iterator[None]:
        try:
            with super()._atomic():
                yield
        except BaseException:
            self._events = []  # who is told of the interruption knows that all requests have ended
            raise

    def _drain(self) -> None:
        """Book all that is under way. The next step begins anew."""
        with self._atomic():
            self._events += self._commit_finished(len(self._launched))
        self._is_ahead = False

    def close(self) -> None:
        super().close()
        gc.unfreeze()  # or what is left of this engine would stay

    def has_unfinished(self) -> bool:
        return bool(self._launched or self._events) or self.scheduler.has_unfinished()

    def _launch(self, *planned: StepPlan | None) -> list[TokenEvent]:
        """One plan or two. Nothing, or the endings of all requests when a step could not be launched."""
        plans = [plan for plan in planned if plan is not None]
        try:
            at = self.clock()
            collects = self.runner.launch_both(*plans) if len(plans) == 2 else map(self.runner.launch, plans)
            self._launched += [_Launched(plan, at, collect) for plan, collect in zip(plans, collects, strict=True)]
        except Exception:
            return self._fail_step(plans[0])
        return []

    def _commit_finished(self, count: int) -> list[TokenEvent]:
        """What the first `count` of the launched steps brought."""
        events: list[TokenEvent] = []
        under_way, self._launched = self._launched[:count], self._launched[count:]
        for launched in under_way:
            try:
                events += self._commit(launched.plan, launched.collect(), launched.at)
            except Exception:
                return events + self._fail_step(launched.plan)
        return events

    def _end_all(self, where: str) -> list[TokenEvent]:
        """Those of steps launched meanwhile too: nobody asks for their tokens."""
        self._launched, self._is_ahead = [], False
        return super()._end_all(where)
