"""Steps on a CPU keep to their time, however wrong the measure at start was. The clock is the tests'."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from saccade.engine.core import EngineCore
from saccade.scheduler.cpu_step_time import MIN_PREFILL_TOKENS, CpuStepTime, LearnedRate
from saccade.types.latency import StepTime
from saccade.types.step import Slice, StepPlan, StepResult
from tests.helpers.engine.scheduling import FakeImage, FakeRunner, make_config, make_request

STEP = 0.4
QUIET, BUSY = 2_814.0, 98.0  # prompt tokens a second, as they were met
LAYERS = 1_000  # of a picture: it takes many steps
MAXIMUM = 2_048


@dataclass
class Machine:
    """Works at a rate of its own, and has a clock."""

    tokens_per_s: float
    layers_per_s: float = 50.0
    overhead: float = 0.002  # seconds of every step
    now: float = 0.0
    stall: float = 0.0  # of the next step

    def clock(self) -> float:
        return self.now


class Timed(FakeRunner):
    """Takes the time of its machine."""

    def __init__(self, *args: Any, machine: Machine, **how: Any) -> None:
        super().__init__(*args, **how)
        self.machine = machine

    def execute(self, plan: StepPlan) -> StepResult:
        layers = (plan.encode_layers or 0) if self.flying or plan.encode else 0
        slice_s = layers / self.machine.layers_per_s
        tokens = sum(work.end - work.start for work in plan.windows)
        self.machine.now += self.machine.overhead + tokens / self.machine.tokens_per_s + slice_s + self.machine.stall
        self.machine.stall = 0.0
        return replace(super().execute(plan), slice=Slice(layers, slice_s))

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


def started(machine: Machine, measured: float, layers_per_s: float = 50.0, **changes: Any) -> EngineCore:
    config = make_config(
        max_num_batched_tokens=MAXIMUM,
        max_model_len=200_000,
        num_blocks=60_000,
        is_bounded=True,
        step_time=StepTime(STEP, measured, layers_per_s),
        encoder_budget=4_000,
        encoder_cache_slots=8_000,
        **changes,
    )
    return EngineCore(config, Timed(config, layers=LAYERS, machine=machine), clock=machine.clock)


def step_times(core: EngineCore, machine: Machine, count: int) -> list[tuple[int, float]]:
    """Tokens of each step, and its seconds."""
    found = []
    for _ in range(count):
        before = machine.now
        core.step()
        record = core.stats()["recent_steps"][-1]
        found.append((sum(record[f"{kind}_tokens"] for kind in ("text", "decode", "image")), machine.now - before))
    return found


def test_a_rate_that_was_measured_too_low_is_right_after_a_few_steps() -> None:
    machine = Machine(QUIET)
    core = started(machine, measured=BUSY)
    core.add(make_request("long", 50_000))
    steps = step_times(core, machine, 12)
    assert steps[0][0] == int(BUSY * STEP)
    assert all(tokens >= 1.5 * before for (before, _), (tokens, _) in pairwise(steps[:5]))
    assert all(0.95 * STEP <= seconds <= 1.02 * STEP for _, seconds in steps[6:])


def test_a_rate_that_was_measured_too_high_is_right_after_a_few_steps() -> None:
    machine = Machine(BUSY)
    core = started(machine, measured=QUIET)
    core.add(make_request("long", 50_000))
    steps = step_times(core, machine, 8)
    assert steps[0][1] > 10 * STEP
    assert all(0.9 * STEP <= seconds <= 1.1 * STEP for _, seconds in steps[3:])


def test_a_machine_that_becomes_busy_and_quiet_again_is_followed_both_ways() -> None:
    machine = Machine(QUIET)
    core = started(machine, measured=QUIET)
    core.add(make_request("long", 100_000))
    for rate in (BUSY, QUIET, BUSY):
        machine.tokens_per_s = rate
        assert all(0.9 * STEP <= seconds <= 1.1 * STEP for _, seconds in step_times(core, machine, 14)[10:])


def test_one_stall_costs_a_few_smaller_steps_and_no_more() -> None:
    machine = Machine(QUIET)
    core = started(machine, measured=QUIET)
    core.add(make_request("long", 50_000))
    usual = step_times(core, machine, 3)[-1][0]
    machine.stall = 30.0
    step_times(core, machine, 1)
    after = step_times(core, machine, 4)
    assert usual / 5 <= after[0][0] < usual
    assert after[-1][0] >= 0.95 * usual


def test_short_prompts_prove_nothing_against_long_ones() -> None:
    """A few tokens take nearly as long as many: whoever judged by them would cut the next long prompt to pieces."""
    machine = Machine(QUIET, overhead=0.05)
    core = started(machine, measured=QUIET)
    for number in range(20):
        core.add(make_request(f"short{number}", 20, max_tokens=1, first_token=1_000 * number))
        step_times(core, machine, 1)
    core.add(make_request("long", 20_000, first_token=500_000))
    assert step_times(core, machine, 1)[0][0] >= 0.9 * QUIET * STEP


def test_prompts_go_on_beside_answers_that_take_all_of_a_step() -> None:
    machine = Machine(QUIET, overhead=3 * STEP)  # whatever is computed, a step is too long
    core = started(machine, measured=QUIET)
    for number in range(4):
        core.add(make_request(f"a{number}", 5, max_tokens=200, first_token=1_000 * number))
    step_times(core, machine, 10)
    core.add(make_request("long", 5_000, first_token=500_000))
    assert all(tokens >= MIN_PREFILL_TOKENS for tokens, _ in step_times(core, machine, 10))


def test_the_time_that_answers_take_is_not_given_to_prompts_as_well() -> None:
    machine = Machine(QUIET, overhead=STEP / 2)
    core = started(machine, measured=QUIET)
    for number in range(4):
        core.add(make_request(f"a{number}", 5, max_tokens=200, first_token=1_000 * number))
    step_times(core, machine, 10)
    core.add(make_request("long", 20_000, first_token=500_000))
    assert all(seconds <= 1.1 * STEP for _, seconds in step_times(core, machine, 10))


@pytest.mark.parametrize("measured", [2.0, 2_000.0])
def test_encoder_layers_are_learned_in_the_same_way(measured: float) -> None:
    machine = Machine(QUIET, layers_per_s=50.0)
    core = started(machine, QUIET, layers_per_s=measured)
    core.add(make_request("p", 4, FakeImage("cat", 2_000)))
    seconds = [seconds for _, seconds in step_times(core, machine, 14)]
    assert all(0.8 * STEP <= each <= 1.1 * STEP for each in seconds[10:])


def test_layers_that_the_operator_chose_stay() -> None:
    machine = Machine(QUIET)
    core = started(machine, QUIET, encode_layers_per_step=3)
    core.add(make_request("p", 4, FakeImage("cat", 2_000)))
    step_times(core, machine, 5)
    assert core.scheduler.policy.time is not None and core.scheduler.policy.time.layers == 3


def test_a_step_never_holds_more_tokens_than_the_option_says() -> None:
    cpu_step_time = CpuStepTime(StepTime(STEP, 1e9, 0.0), MAXIMUM, None)
    assert cpu_step_time.tokens(0) == cpu_step_time.tokens(100) == MAXIMUM


def test_steps_of_no_time_at_all_break_nothing() -> None:
    cpu_step_time = CpuStepTime(StepTime(STEP, BUSY, 1.0), MAXIMUM, None)
    cpu_step_time.observe(0, 100, Slice(4, 0.0), 0.0)
    cpu_step_time.observe(1, 0, Slice(), 0.0)
    assert cpu_step_time.tokens(1) <= 1 + 2 * BUSY * STEP


def test_a_rate_never_falls_below_the_least() -> None:
    rate = LearnedRate(100.0, minimum=40.0)
    for _ in range(5):
        rate.learn(16, seconds=1e6, limit=STEP)
    assert rate.value == 40.0
