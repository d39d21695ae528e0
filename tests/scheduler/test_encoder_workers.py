"""Plans beside encoder workers: images cost a step nothing, and whatever happens to workers, everything drains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.errors import RequestError
from saccade.types.latency import LatencyProfile
from saccade.types.media import Key
from saccade.types.step import MediaTimes, StepPlan, StepResult
from tests.helpers.engine.random_workloads import CONFIGS, REQUESTS, assert_nothing_is_held, drive
from tests.helpers.engine.scheduling import FakeImage, FakeRunner, Rig

PACE = LatencyProfile(decode_ms=((1, 1.0),), prefill_ms=((2, 0.5), (64, 1.0)), layer_ms=((4, 0.5),), ceiling_ms=2.5)
PHOTO = FakeImage("photo", 12)


class WorkersRunner(FakeRunner):
    """Images take workers `delay` steps, whatever the layers; while none is up, layers of the engine."""

    def __init__(self, *given: Any, delay: int = 3, down: frozenset[int] = frozenset(), **how: Any) -> None:
        super().__init__(*given, **how)
        self.delay = delay
        self.down = down  # steps in which no worker is up
        self.far: dict[Key, int] = {}
        self.step = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.step += 1
        result = super().execute(plan)
        is_up = self.step not in self.down
        return replace(result, local_work=len(self.flying) if is_up else None)

    def _encode(self, plan: StepPlan) -> tuple[Mapping[Key, MediaTimes], Mapping[Key, RequestError]]:
        waits = plan.encode_layers is None  # for everything
        if self.step not in self.down:
            self.far |= {item.key: 1 + self.delay for item in plan.encode}
            plan = replace(plan, encode=())
        self.far = {key: 0 if waits else left - 1 for key, left in self.far.items()}
        encoded, failed = super()._encode(plan)
        landed = {key for key, left in self.far.items() if left <= 0}
        self.far = {key: left for key, left in self.far.items() if left > 0}
        good = landed - self.broken
        self.embeddings |= good
        self.encoded += good
        errors = {key: RequestError("this picture cannot be decoded") for key in landed & self.broken}
        return {**encoded, **dict.fromkeys(good, MediaTimes(2.0, 3.0))}, {**failed, **errors}

    def reset(self) -> None:
        super().reset()
        self.far.clear()


def workers(delay: int = 3, down: frozenset[int] = frozenset(), **changes: Any) -> Rig:
    broken = changes.pop("broken", ())
    rig = Rig(**{"num_encoders": 2, **changes})
    rig.runner = WorkersRunner(rig.config, broken, delay=delay, down=down)
    rig.add("first", 3, max_tokens=1)
    rig.step()  # from now on the scheduler knows that workers are up
    return rig


@pytest.mark.parametrize("policy", [{}, {"latency": PACE}, {"is_bounded": True}])
def test_no_step_waits_for_a_worker(policy: dict[str, Any]) -> None:
    """Text that comes after an image has its first token while that is still encoded."""
    rig = workers(delay=8, **policy)
    rig.add("image", PHOTO, 2, max_tokens=1)
    rig.step()
    rig.add("text", 5, max_tokens=4)
    while "text" not in rig.events:
        assert "image" not in rig.events
        rig.step()
    rig.drain()
    assert all(plan.encode_layers is not None for plan in rig.plans[1:])


def test_images_in_workers_leave_all_of_a_step_to_prefill() -> None:
    """With an own encoder prefill and encoding take turns beside decodes."""
    rigs = [workers(delay=30, latency=PACE), Rig(latency=PACE, layers=60)]
    for rig in rigs:
        rig.add("decode", 3, max_tokens=60)
        rig.step()
        rig.step()
        rig.add("image", PHOTO, 2, max_tokens=1)
        rig.step()
        rig.add("text", 640, max_tokens=1)
    steps = []
    for rig in rigs:
        before = len(rig.plans)
        while "text" not in rig.events:
            rig.step()
        steps.append(len(rig.plans) - before)
    assert steps[0] < steps[1]


def test_more_images_are_in_flight_than_one_encoder_may_have() -> None:
    rig = workers(encoder_budget=12)
    for name in "abcd":
        rig.add(name, FakeImage(name, 12), 1, max_tokens=1)
    rig.step()
    assert len(rig.runner.far) == 3  # its own share and one for each of two workers
    rig.drain()


def test_without_workers_the_engine_has_its_own_share_and_finishes_what_it_starts() -> None:
    rig = Rig(num_encoders=2, encoder_budget=12)
    for name in "abcd":
        rig.add(name, FakeImage(name, 12), 1, max_tokens=1)
    plan = rig.step()
    assert len(plan.encode) == 1 and plan.encode_layers is None


def test_an_image_that_workers_lost_is_given_layers_of_the_engine() -> None:
    rig = workers(latency=PACE, down=frozenset(range(2, 200)))
    rig.add("image", PHOTO, 2, max_tokens=1)
    rig.drain()
    assert rig.finish_of("image") == "length"


@settings(max_examples=120, deadline=None)
@given(
    CONFIGS,
    st.lists(REQUESTS, min_size=1, max_size=8),
    st.integers(0, 5),
    st.frozensets(st.integers(1, 60), max_size=40),
    st.integers(1, 3),
)
def test_any_workload_drains_whatever_workers_do(
    config: dict, requests: list, delay: int, down: frozenset[int], count: int
) -> None:
    rig = Rig(broken=["broken"], num_encoders=count, **config)
    rig.runner = WorkersRunner(rig.config, ["broken"], delay=delay, down=down)
    accepted = drive(rig, requests)
    endings = {name: [e for e in rig.events[name] if e.finish_reason] for name in accepted}
    assert all(len(ends) == 1 and rig.events[name][-1] is ends[0] for name, ends in endings.items())
    assert_nothing_is_held(rig)
