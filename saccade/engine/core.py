"""The step loop: plan, run, commit. Knows neither text nor HTTP; the clock is read here and passed on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from saccade.engine.step_stats import StepTrace
from saccade.errors import RequestError
from saccade.options.engine import SchedulerConfig
from saccade.scheduler.scheduler import Scheduler
from saccade.types.events import TokenEvent
from saccade.types.media import MediaItem
from saccade.types.request import Request
from saccade.types.step import StepPlan, StepResult

_MIN_PATIENCE = 0.001  # seconds that a step waits for grammars: a quarter of the last step, within these
_MAX_PATIENCE = 0.02

logger = logging.getLogger("saccade.engine")


class StepRunner(Protocol):
    """What the core needs of a runner; tests put a fake here."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def reset(self) -> None:
        """Forget all requests after a broken step; an error means that no step can be computed any more."""

    def stats(self) -> dict[str, Any]: ...

    def release(self) -> None:
        """Drop images that were decoded early: no request is left that could need them."""

    def close(self) -> None: ...


class OpenGrammars(Protocol):
    """What some requests wait for beside their turn."""

    def of(self, request: Request) -> object:
        """Begin to make it, in another thread."""

    @property
    def has_open(self) -> bool: ...

    def not_ready(self, num_open: int, patience: float) -> frozenset[str]:
        """Requests whose grammar is not ready for the next step."""

    def end(self, request_id: str) -> None: ...


class Profiles(Protocol):
    """One profile at a time; ConfigError where it cannot begin or end."""

    def start(self, prefix: str | None = None) -> None: ...

    def stop(self) -> Path: ...


class EngineCore:
    """A scheduler and a runner in lockstep. `limits` is what requests are admitted under."""

    def __init__(
        self,
        limits: SchedulerConfig,
        runner: StepRunner,
        clock: Callable[[], float] = time.perf_counter,
        reasons: Sequence[str] = (),
        grammars: OpenGrammars | None = None,
        device: str = "cpu",
        profiler: Profiles | None = None,
    ) -> None:
        self.limits = limits
        self.device = device  # in words
        self.reasons = tuple(reasons)  # why the limits are what they are, one line each
        self.scheduler = Scheduler(limits)
        self.runner = runner
        self.clock = clock
        self.profiler = profiler
        self._grammars = grammars  # None: no request has one
        self._step_seconds = 0.0  # of the latest step
        self._trace = StepTrace()

    def step(self, *, latency_bounded: bool = True) -> list[TokenEvent]:
        """One step. `latency_bounded`: tokens are wanted as they come; other work must not slow decodes."""
        with self._atomic():
            start = self.clock()
            plan = self._plan(start, latency_bounded)
            result = self._run(plan)
            events = result if isinstance(result, list) else self._commit(plan, result, start)
            self.scheduler.index()  # a little after each step, not all of it at the next lookup
            return events

    def _plan(self, now: float, latency_bounded: bool) -> StepPlan:
        not_ready = self._not_ready(max(_MIN_PATIENCE, min(self._step_seconds / 4, _MAX_PATIENCE)))
        return self.scheduler.schedule(now, latency_bounded=latency_bounded, not_ready=not_ready)

    def _not_ready(self, patience: float = 0.0) -> frozenset[str]:
        """Requests whose grammar is not ready within `patience` seconds: they sit the next step out."""
        return self._grammars.not_ready(self.scheduler.num_open, patience) if self._grammars else frozenset()

    @contextmanager
    def _atomic(self) -> Iterator[None]:
        """Interrupted, or an invariant is broken: no plan may stay."""
        try:
            yield
        except BaseException:
            self._end_all("between steps")
            raise

    def _run(self, plan: StepPlan) -> StepResult | list[TokenEvent]:
        """The result, or the endings of all requests when the step could not be computed."""
        try:
            return self.runner.execute(plan)
        except Exception:
            return self._fail_step(plan)

    def _commit(self, plan: StepPlan, result: StepResult, start: float) -> list[TokenEvent]:
        now = self.clock()
        self._step_seconds = now - start
        self._trace.record(plan, result, now - start)
        return self._ended(self.scheduler.commit(plan, result, now, now - start))

    def _ended(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """The same; what ended needs no grammar any more."""
        if self._grammars and self._grammars.has_open:
            for event in events:
                if event.finish_reason:
                    self._grammars.end(event.request_id)
        return events

    def add(self, request: Request) -> None:
        self.scheduler.add(request, self.clock())
        if self._grammars:
            self._grammars.of(request)

    def add_all(self, requests: Iterable[Request]) -> None:
        """All of them or none: where one is refused, those before it are taken back."""
        request_ids: list[str] = []
        try:
            for request in requests:
                self.add(request)
                request_ids.append(request.request_id)
        except BaseException:
            for request_id in request_ids:
                self.abort(request_id)
            raise

    def prefetch_media(self, items: Sequence[MediaItem]) -> None:
        """Images of a request that is still being prepared. Here they are decoded when a step needs them."""

    def launch_if_full(self, *, latency_bounded: bool = True) -> None:
        """More requests come at once, but a step may be full without them. Here steps run one by one."""

    def abort(self, request_id: str) -> TokenEvent | None:
        event = self.scheduler.abort(request_id, self.clock())
        self._ended([event] if event else [])
        self.release_if_idle()
        return event

    def release_if_idle(self) -> None:
        """A request has gone, or was prefetched and does not come. If it was alone, drop decoded images."""
        if not self.has_unfinished():
            self.runner.release()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV blocks. False, and nothing is done, while requests are open."""
        if self.has_unfinished():
            return False
        self.scheduler.reset_prefix_cache()
        return True

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished()

    def stats(self) -> dict[str, Any]:
        return {**self.scheduler.stats(), **self.runner.stats(), "recent_steps": self._trace.recent()}

    def close(self) -> None:
        self.runner.close()

    def _fail_step(self, plan: StepPlan) -> list[TokenEvent]:
        return self._end_all(f"in step {plan.step}, which computed {len(plan.windows)} requests")

    def _end_all(self, where: str) -> list[TokenEvent]:
        """A step broke: nothing in the caches can be trusted, every open request ends, the engine goes on.

        Unless the runner says that it cannot, by an error of its own: then this process is of no use.
        """
        logger.exception("the engine failed %s; all open requests end", where)
        error = RequestError(f"the engine failed {where}; send the request again", code="engine_error")
        events = self._ended(self.scheduler.fail_all(error, self.clock()))
        self._trace.reset()
        self.runner.reset()
        return events
