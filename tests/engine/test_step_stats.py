"""What the engine remembers of its latest steps, with a fake runner."""

from __future__ import annotations

from typing import Any

from saccade.engine.core import EngineCore
from saccade.engine.step_stats import NUM_KEPT
from saccade.types.step import StepPlan, StepResult
from tests.helpers.engine.scheduling import FakeImage, FakeRunner, Part, make_config, make_request


class Runner(FakeRunner):
    is_broken = False

    def execute(self, plan: StepPlan) -> StepResult:
        if self.is_broken:
            raise RuntimeError("the step broke")
        return super().execute(plan)

    def stats(self) -> dict[str, Any]:
        return {}


def make_core(**changes: Any) -> EngineCore:
    config = make_config(**changes)
    clock = iter(range(1_000_000))
    return EngineCore(config, Runner(config), clock=lambda: float(next(clock)))


def run(core: EngineCore, *parts: Part, max_tokens: int = 3) -> list[dict[str, Any]]:
    core.add(make_request("a", *parts, max_tokens=max_tokens))
    while core.has_unfinished():
        core.step()
    steps: list[dict[str, Any]] = core.stats()["recent_steps"]
    return steps


def sums(steps: list[dict[str, Any]]) -> tuple[int, int, int]:
    names = ("decode_tokens", "text_tokens", "image_tokens")
    decode, text, image = (sum(step[name] for step in steps) for name in names)
    return decode, text, image


def test_a_step_tells_text_from_image_from_answer_tokens() -> None:
    steps = run(make_core(), 5, FakeImage("p", 12), 3)
    assert sums(steps) == (2, 8, 12)


def test_the_sums_are_the_same_when_prefill_comes_in_chunks() -> None:
    whole, chunked = make_core(), make_core(max_num_batched_tokens=4)
    assert sums(run(whole, 5, FakeImage("p", 12), 3)) == sums(run(chunked, 5, FakeImage("p", 12), 3))


def test_a_prompt_of_one_token_is_text_and_no_answer() -> None:
    assert sums(run(make_core(), 1, max_tokens=1)) == (0, 1, 0)


def test_a_image_counts_in_each_step_it_is_in_the_encoder() -> None:
    steps = run(make_core(encode_layers_per_step=1, is_bounded=True), 5, FakeImage("p", 12))
    assert [step["encodes"] for step in steps].count(1) == 4  # layers of the fake encoder


def test_steps_have_their_number_and_their_time() -> None:
    steps = run(make_core(), 5)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert {step["ms"] for step in steps} == {1000.0}  # the clock of this test ticks once a step


def test_only_the_latest_steps_are_kept() -> None:
    steps = run(make_core(), 5, max_tokens=NUM_KEPT + 9)
    assert len(steps) == NUM_KEPT and steps[-1]["step"] == NUM_KEPT + 9


def test_after_a_broken_step_requests_of_the_same_name_are_counted_anew() -> None:
    core = make_core()
    assert isinstance(core.runner, Runner)
    core.add(make_request("a", 5, FakeImage("p", 12)))
    core.runner.is_broken = True
    core.step()
    core.runner.is_broken, core.runner.has_broken = False, True
    assert sums(run(core, 7)) == (2, 7, 0)
