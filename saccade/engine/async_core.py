"""The step loop for a device that computes by itself: while it runs a step, the host deals with the last one.

    host     | collect 1, plan 2, launch 2 | text of 1 | collect 2, plan 3, launch 3 | text of 2 | ...
    device         idle for a moment       | ---------- step 2 ----------            | ------ step 3

Where the device samples by itself, the next decode step is launched before the tokens of this one are known
(async decode). Prefill and encoding are planned and launched while a decode step runs, and collected when the
next one does, so that tokens wait neither for prompts nor for images. The device is never idle:

    host     | collect prefill 1, plan and launch prefill 2 and decode 3, collect decode 2, text of 2 | ...
    device   | ---- decode 2 ---- | ---- prefill 2 ---- | ---- decode 3 ---- | ...

Where no prompt ends in prefill 2, it may run with decode 3 as one mixed batch, which reads the weights once.

`EngineCore` is the plain loop: the same tokens, one step at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from saccade.engine.core import EngineCore, StepRunner
from saccade.engine.process_tuning import unfreeze
from saccade.options.engine import SchedulerConfig
from saccade.types.events import TokenEvent
from saccade.types.media import Key, MediaItem
from saccade.types.request import Request
from saccade.types.step import Collect, StepPlan

_REMEMBERED = 512  # images, by their content keys


class LaunchingRunner(StepRunner, Protocol):
    def launch(self, plan: StepPlan) -> Collect: ...

    def launch_both(self, prefill: StepPlan, decode: StepPlan) -> tuple[Collect, Collect]:
        """In this order, or as one mixed batch."""

    def prefetch_media(self, items: Sequence[MediaItem]) -> None:
        """Images that later steps will need: worker threads decode them beside the host and the device."""


class _Launched(NamedTuple):
    plan: StepPlan
    at: float
    collect: Collect


class AsyncEngineCore(EngineCore):
    """`step` launches the next step, commits the one that ran, and returns its events."""

    runner: LaunchingRunner

    def __init__(self, limits: SchedulerConfig, runner: LaunchingRunner, **more: Any) -> None:
        super().__init__(limits, runner, **more)
        self._launched: list[_Launched] = []  # in the order of the device
        self._events: list[TokenEvent] = []  # committed between two steps
        self._seen: OrderedDict[Key, None] = OrderedDict()  # images that came lately

    def step(self, *, latency_bounded: bool = True) -> list[TokenEvent]:
        with self._atomic():
            return self._step(latency_bounded)

    def _step(self, latency_bounded: bool) -> list[TokenEvent]:
        events = self._take_events()
        if self._kinds[:1] == ["async_prefill"]:
            events += self._commit_finished(1)
        prefill = self._plan_async_prefill(latency_bounded) if self._runs_async_decode else None
        decode = self.scheduler.schedule_async_decode() if self._launched else None
        events += self._launch(prefill, decode)
        if self._launched:
            self.scheduler.index()  # nothing is left to launch: the device works, and its tokens are awaited
            events += self._commit_finished(1 if self._runs_async_decode else len(self._launched))
        if self._may_launch(latency_bounded, events):
            events += self._launch(self._plan(self.clock(), latency_bounded))
        return events

    def _take_events(self) -> list[TokenEvent]:
        events = self._events
        self._events = []
        return events

    def _plan_async_prefill(self, latency_bounded: bool) -> StepPlan | None:
        not_ready = self._not_ready()
        now = self.clock()
        return self.scheduler.schedule_async_prefill(
            now, latency_bounded=latency_bounded, not_ready=not_ready
        )

    @property
    def _runs_async_decode(self) -> bool:
        """The last launched step is an async decode, and nothing was planned beside it yet."""
        return self._kinds[-1:] == ["async_decode"]

    @property
    def _kinds(self) -> list[str]:
        """Of the steps that run, in order."""
        return [launched.plan.kind for launched in self._launched]

    def _may_launch(self, latency_bounded: bool, events: list[TokenEvent]) -> bool:
        """Not before last tokens are handed out where a launch takes long: without decodes, whole images."""
        waits = all((events, latency_bounded, not self.scheduler.has_decodes))
        return not self._launched and self.scheduler.has_unfinished() and not waits

    def add(self, request: Request) -> None:
        """Waits for running steps that compute for an earlier request of this id, which has ended."""
        windows = (window for launched in self._launched for window in launched.plan.windows)
        if any(window.request_id == request.request_id for window in windows):
            self._drain()
        super().add(request)
        try:
            if items := self.scheduler.missing(request.request_id):
                self.runner.prefetch_media(items)
        except BaseException:  # interrupted: the caller will not learn that it was added
            super().abort(request.request_id)
            raise

    def prefetch_media(self, items: Sequence[MediaItem]) -> None:
        """Where no request is open, decode the first new image while the rest of its prompt is prepared.

        For an image that came before, a cache may have all that is needed: only the whole prompt will tell.
        """
        new = [i for i in items if i.key not in self._seen and not self.scheduler.has_image(i.key)]
        for item in items:
            self._seen[item.key] = None
            self._seen.move_to_end(item.key)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        if new and not self.has_unfinished():
            self.runner.prefetch_media(new[:1])

    def launch_if_full(self, *, latency_bounded: bool = True) -> None:
        """Launch a step that is full: the device runs it while requests are added that would not fit."""
        if not self._launched and self.scheduler.fills_step():
            with self._atomic():
                self._events += self._launch(self._plan(self.clock(), latency_bounded))

    def abort(self, request_id: str) -> TokenEvent | None:
        """Waits for running steps: what they computed must be known before the request's blocks are free.

        The event that is returned is the request's last one, also where it has just ended by itself.
        """
        self._drain()
        events = [event for event in self._events if event.request_id == request_id]
        self._events = [event for event in self._events if event.request_id != request_id]
        return super().abort(request_id) or next((event for event in events if event.finish_reason), None)

    @contextmanager
    def _atomic(self) -> Iterator[None]:
        try:
            with super()._atomic():
                yield
        except BaseException:
            self._events = []  # the interruption tells that all requests have ended
            raise

    def _drain(self) -> None:
        """Commit all running steps. The next step is planned with all tokens known."""
        with self._atomic():
            self._events += self._commit_finished(len(self._launched))

    def close(self) -> None:
        super().close()
        unfreeze()  # or what is left of this engine would stay

    def has_unfinished(self) -> bool:
        return any((self._launched, self._events, self.scheduler.has_unfinished()))

    def _launch(self, *planned: StepPlan | None) -> list[TokenEvent]:
        """One plan or two. No events, or the endings of all requests when a step could not be launched."""
        plans = [plan for plan in planned if plan is not None]
        try:
            at = self.clock()
            collects = self.runner.launch_both(*plans) if len(plans) == 2 else map(self.runner.launch, plans)
            pairs = zip(plans, collects, strict=True)
            self._launched += [_Launched(plan, at, collect) for plan, collect in pairs]
        except Exception:
            return self._fail_step(plans[0])
        return []

    def _commit_finished(self, count: int) -> list[TokenEvent]:
        """What the first `count` of the launched steps brought."""
        events: list[TokenEvent] = []
        finished = self._launched[:count]
        del self._launched[:count]
        for launched in finished:
            try:
                events += self._commit(launched.plan, launched.collect(), launched.at)
            except Exception:
                return events + self._fail_step(launched.plan)
        return events

    def _end_all(self, where: str) -> list[TokenEvent]:
        """Steps launched meanwhile are dropped too."""
        self._launched = []
        return super()._end_all(where)
