"""A fake runner for the async core: launches are listed, and results come when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from saccade.engine.core import EngineCore
from saccade.types.events import TokenEvent
from saccade.types.media import MediaItem
from saccade.types.step import StepPlan, StepResult
from tests.helpers.engine.scheduling import FakeRunner


class Launching(FakeRunner):
    is_dead = False

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        result = self.execute(plan)
        return lambda: result

    def launch_both(
        self, beside: StepPlan, ahead: StepPlan
    ) -> tuple[Callable[[], StepResult], Callable[[], StepResult]]:
        return self.launch(beside), self.launch(ahead)

    def prefetch_media(self, items: Sequence[MediaItem]) -> None:
        """Nothing is decoded here."""

    def execute(self, plan: StepPlan) -> StepResult:
        if self.is_dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().execute(plan)

    def reset(self) -> None:
        if self.is_dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        super().reset()

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def drained(core: EngineCore) -> list[TokenEvent]:
    events = []
    while core.has_unfinished():
        events += core.step()
    core.scheduler.check()
    return events
