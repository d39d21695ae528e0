"""The overlapped loop where parts of prompts are launched together with the next decode step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from saccade.engine.async_core import AsyncEngineCore
from saccade.engine.core import EngineCore
from saccade.types.events import TokenEvent
from saccade.types.step import StepPlan, StepResult
from tests.helpers.engine.async_scheduling import MIXED
from tests.helpers.engine.scheduling import FakeImage, Part, make_config, make_request
from tests.helpers.kernels.launching import Launching, drained

Collects = tuple[Callable[[], StepResult], Callable[[], StepResult]]
REQUESTS: list[tuple[list[Part], int]] = [
    ([5], 30),
    ([300], 4),
    ([FakeImage("a", 150), 8], 6),
    ([20], 25),
    ([FakeImage("b", 200), 4, FakeImage("a", 150)], 3),
    ([90], 10),
]


class Riding(Launching):
    """Notes what it is given together, and in which order results are asked for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rode: list[tuple[int, int]] = []  # tokens of prompts, requests that decoded
        self.asked: list[str] = []
        self.is_failing = False

    def launch_both(self, beside: StepPlan, ahead: StepPlan) -> Collects:
        if self.is_failing:
            raise RuntimeError("the device is on fire")
        first, second = super().launch_both(beside, ahead)
        if beside.fuse_with_next:
            self.rode.append((sum(work.end - work.start for work in beside.windows), len(ahead.windows)))
        return self._noted("beside", first), self._noted("ahead", second)

    def _noted(self, name: str, collect: Callable[[], StepResult]) -> Callable[[], StepResult]:
        return lambda: (self.asked.append(name), collect())[1]


def answered(core: EngineCore, apart: int = 2) -> dict[str, list[TokenEvent]]:
    """What becomes of requests that come one after the other."""
    events: list[TokenEvent] = []
    for number, (parts, max_tokens) in enumerate(REQUESTS):
        core.add(make_request(str(number), *parts, max_tokens=max_tokens, temperature=0, first_token=1_000 * number))
        for _ in range(apart):
            events += core.step()
    events += drained(core)
    return {str(i): [event for event in events if event.request_id == str(i)] for i in range(len(REQUESTS))}


@pytest.mark.parametrize("num_blocks", [4_000, 130], ids=["roomy", "preempting"])
def test_answers_are_those_of_the_plain_loop_though_prompts_ride_along(num_blocks: int) -> None:
    config = make_config(latency=MIXED, num_blocks=num_blocks, encoder_cache_slots=400, encoder_budget=400)
    plain, riding = (
        answered(EngineCore(config, Launching(config))),
        answered(AsyncEngineCore(config, runner := Riding(config))),
    )
    assert [[e.token_id for e in events] for events in riding.values()] == [
        [e.token_id for e in events] for events in plain.values()
    ]
    assert all([e.finish_reason for e in events][-1] == "length" for events in riding.values())
    assert max(tokens for tokens, _ in runner.rode) > 32


def beside_an_answer() -> tuple[AsyncEngineCore, Riding]:
    """A long prompt has come while an answer is under way, and a part of it rides along."""
    config = make_config(latency=MIXED, enable_prefix_caching=False)
    core = AsyncEngineCore(config, runner := Riding(config))
    core.add(make_request("a", 5, max_tokens=40, temperature=0))
    core.step()
    core.step()
    core.add(make_request("p", 500, max_tokens=2, temperature=0))
    while not runner.rode:
        core.step()
    return core, runner


def test_what_rode_along_is_booked_before_the_tokens_of_its_step_are_waited_for() -> None:
    core, runner = beside_an_answer()
    runner.asked.clear()
    core.step()
    assert runner.asked == ["beside", "ahead"] and len(runner.rode) == 2


def test_a_launch_of_both_that_fails_ends_all_requests_and_the_engine_goes_on() -> None:
    core, runner = beside_an_answer()
    runner.is_failing = True
    ended = {event.request_id for event in core.step() if event.error and event.error.code == "engine_error"}
    assert ended == {"a", "p"} and not core.has_unfinished()
    runner.is_failing = False
    core.add(make_request("b", 5, max_tokens=4, temperature=0))
    assert [event.token_id for event in drained(core)] == [1_005, 1_006, 1_007, 1_008]


def test_an_error_of_the_device_in_a_pass_for_both_ends_the_requests_of_both() -> None:
    core, runner = beside_an_answer()
    runner._noted = lambda name, collect: broken if name == "ahead" else collect  # type: ignore[method-assign]
    core.step()
    ended = {event.request_id for event in core.step() if event.finish_reason == "error"}
    assert ended == {"a", "p"} and not core.has_unfinished()


def broken() -> StepResult:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_request_aborted_while_it_rides_along_leaves_the_others_alone() -> None:
    core, _ = beside_an_answer()
    ended = core.abort("p")
    assert ended is not None and ended.finish_reason == "abort"
    events = drained(core)
    assert {event.request_id for event in events} == {"a"} and events[-1].finish_reason == "length"
