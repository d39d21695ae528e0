"""A scheduler driven as the async core drives it: each step is planned while the one before runs."""

from __future__ import annotations

from typing import Any

from saccade.types.latency import LatencyProfile
from saccade.types.request import NO_TENANT, Tenant
from saccade.types.step import StepPlan, StepResult
from tests.helpers.engine.scheduling import Rig

PACE = LatencyProfile(decode_ms=((1, 1.0),), prefill_ms=((2, 0.5), (8, 1.0)), layer_ms=((4, 0.5),), ceiling_ms=2.5)

ALONE, RIDING = 32, 96  # tokens that fit beside an answer
MIXED = LatencyProfile(
    decode_ms=((1, 1.0), (16, 1.0)),
    prefill_ms=((ALONE, 1.0), (64, 2.0)),
    layer_ms=((4, 0.5),),
    ceiling_ms=2.5,
    mixed_ms=((4, ((64, 1.5), (RIDING, 2.0), (128, 3.0))),),
)


class AheadRig(Rig):
    """Runs plans in the order of a device that is told of the next one before it has finished the last."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.under_way: list[tuple[StepPlan, StepResult]] = []
        self.prompt_lengths: dict[str, int] = {}
        self.is_ahead = False

    def step(self) -> StepPlan:
        self.now += 1
        if self.under_way and self.under_way[0][0].kind == "async_prefill":
            self.book(1)
        if self.is_ahead:
            self.run(self.scheduler.schedule_async_prefill(self.now))
        count = len(self.under_way)
        if count:
            self.run(self.scheduler.schedule_async_decode())
            self.is_ahead = len(self.under_way) > count
            self.book(1 if self.is_ahead else count)
        if not self.under_way and self.scheduler.has_unfinished():
            self.run(self.scheduler.schedule(self.now))
        return self.plans[-1]

    def run(self, plan: StepPlan | None) -> None:
        self.scheduler.check()
        if plan is not None:
            self.prompt_lengths |= {a.request.request_id: len(a.request.prompt) for a in plan.admitted}
            self.under_way.append((plan, self.runner.execute(plan)))
            self.plans.append(plan)

    def book(self, count: int) -> None:
        under_way, self.under_way = self.under_way[:count], self.under_way[count:]
        for plan, result in under_way:
            for event in self.scheduler.commit(plan, result, self.now, 0.5):
                self.take(event)
            self.scheduler.check()

    def leave(self, request_id: str) -> None:
        self.book(len(self.under_way))
        self.is_ahead = False
        self.take(self.scheduler.abort(request_id, self.now))

    def finish(self) -> None:
        self.drain()
        self.book(len(self.under_way))


def add(rig: Rig, name: str, *parts: Any, max_tokens: int, tenant: Tenant = NO_TENANT) -> None:
    rig.add(name, *parts, max_tokens=max_tokens, temperature=0, tenant=tenant)
