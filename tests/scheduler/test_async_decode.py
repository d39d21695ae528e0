"""Steps planned ahead and what is planned beside them: the same answers, and nothing leaks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saccade.errors import RequestError
from saccade.types.latency import LatencyProfile
from saccade.types.request import NO_TENANT, Tenant
from saccade.types.step import Sample, ScheduledWindow, StepPlan, StepResult
from tests.helpers.engine.async_scheduling import PACE, AheadRig, add
from tests.helpers.engine.scheduling import EOS, FakeImage, FakeRunner, Rig, key_of

RIDING = replace(PACE, mixed_ms=((3, ((4, 1.5), (9, 2.0))),))
PARTS = st.one_of(st.integers(1, 9), st.sampled_from([FakeImage("a", 3), FakeImage("b", 3), FakeImage("c", 6)]))
REQUESTS = st.tuples(
    st.lists(PARTS, min_size=1, max_size=4),
    st.integers(1, 12),  # max_tokens
    st.integers(0, 8),  # the step at which it arrives
    st.one_of(st.none(), st.integers(0, 15)),  # the step at which its client leaves
)
CONFIGS = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.sampled_from([3, 8, 30]),
        "max_num_seqs": st.integers(1, 6),
        "block_size": st.sampled_from([1, 4]),
        "num_blocks": st.sampled_from([45, 300]),
        "encoder_budget": st.sampled_from([12, 100]),
        "encoder_cache_slots": st.sampled_from([12, 100]),
        "enable_prefix_caching": st.booleans(),
        "encode_layers_per_step": st.sampled_from([None, 1]),
        "latency": st.sampled_from([None, PACE, RIDING, replace(PACE, max_prefills=2)]),
        "host_blocks": st.sampled_from([0, 5, 200]),
        "restore_ms_per_block": st.sampled_from([0.0, 0.6]),  # two in a step with decodes
    }
)


RUBBISH = 777


class GoingOn(FakeRunner):
    """A device that was told of the next step: behind a window without its picture it computes rubbish."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lost: set[str] = set()

    def execute(self, plan: StepPlan) -> StepResult:
        in_vain = [work for work in plan.windows if work.request_id in self.lost]
        decode = tuple(work for work in plan.decode if work not in in_vain)
        prefill = tuple(work for work in plan.prefill if work not in in_vain)
        result = super().execute(replace(plan, decode=decode, prefill=prefill))
        self.lost |= self.spoiled
        for work in in_vain:
            self.blocks[work.request_id] += work.new_blocks
            self.kv |= {self._slot(work.request_id, place): b"rubbish" for place in range(work.start, work.end)}
        return replace(result, samples={**result.samples, **{w.request_id: Sample(RUBBISH, None) for w in in_vain}})

    def _sample(self, work: ScheduledWindow) -> Sample:
        return Sample(RUBBISH, None) if work.request_id in self.spoiled else super()._sample(work)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    CONFIGS,
    st.lists(REQUESTS, min_size=1, max_size=10),
    st.sets(st.sampled_from("abc")),
    st.lists(st.sampled_from([NO_TENANT, Tenant("other", 3.0)]), min_size=10, max_size=10),
)
def test_any_workload_planned_ahead_drains_and_each_request_ends_once(
    config: dict, requests: list, broken: set[str], tenants: list[Tenant]
) -> None:
    rig, accepted = AheadRig(**config), []
    rig.runner = GoingOn(rig.config, broken)
    rig.runner.next_token = lambda name, position: EOS if (position + len(name)) % 11 == 0 else 1_000 + position
    for moment in range(16):
        for number, (parts, max_tokens, arrival, leaving) in enumerate(requests):
            if arrival == moment:
                try:
                    add(rig, f"r{number}", *parts, max_tokens=max_tokens, tenant=tenants[number])
                    accepted.append(f"r{number}")
                except RequestError as error:
                    assert "KV blocks" in error.message
            if leaving == moment:
                rig.leave(f"r{number}")
        if rig.scheduler.has_unfinished():
            rig.step()
    rig.finish()
    endings = {name: [e for e in rig.events[name] if e.finish_reason] for name in accepted}
    assert all(len(ends) == 1 and rig.events[name][-1] is ends[0] for name, ends in endings.items())
    assert not any(RUBBISH in rig.tokens_of(name) for name in accepted)
    stats = rig.scheduler.stats()
    assert stats["kv"]["used"] == 0 and stats["encoder_cache"]["slots_pinned"] == 0


def run_all(requests: list[Any], rig: AheadRig) -> list[StepPlan]:
    rig.runner.next_token = lambda name, position: EOS if (position + len(name)) % 11 == 0 else 1_000 + position
    for moment in range(16):
        for number, (parts, max_tokens, arrival, _) in enumerate(requests):
            if arrival == moment:
                with suppress(RequestError):
                    add(rig, f"r{number}", *parts, max_tokens=max_tokens)
        if rig.scheduler.has_unfinished():
            rig.step()
    rig.finish()
    return rig.plans


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CONFIGS, st.lists(REQUESTS, min_size=1, max_size=6))
def test_where_nobody_else_is_open_the_long_way_plans_nothing_beside_a_step_either(
    config: dict[str, Any], requests: list[Any]
) -> None:
    quick, slow = AheadRig(**config), AheadRig(**config)
    scheduler = slow.scheduler

    def schedule_async_prefill(now: float) -> StepPlan | None:
        served = frozenset(work.request_id for work in scheduler._plans[0].windows)
        return scheduler._plan(now, True, frozenset(), served)

    scheduler.schedule_async_prefill = schedule_async_prefill  # type: ignore[method-assign]
    found = [[(p.step, p.windows, p.encode_layers) for p in run_all(requests, rig)] for rig in (quick, slow)]
    assert found[0] == found[1]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CONFIGS, st.lists(REQUESTS, min_size=1, max_size=6))
def test_an_async_decode_step_has_one_token_after_the_prompt_for_each_request(
    config: dict[str, Any], requests: list[Any]
) -> None:
    rig = AheadRig(**config)
    for plan in run_all(requests, rig):
        if plan.kind == "async_decode":
            assert not plan.prefill
            assert all(window.end - window.start == 1 and window.samples for window in plan.decode)
            assert all(window.start >= rig.prompt_lengths[window.request_id] for window in plan.decode)


def answered(rig: Rig) -> list[list[int]]:
    add(rig, "text", 9, max_tokens=9)
    for _ in range(3):
        rig.step()
    add(rig, "seen", 3, FakeImage("a", 6), 2, max_tokens=4)
    rig.drain()
    return [rig.tokens_of(name) for name in ("text", "seen")]


def test_tokens_planned_ahead_are_those_of_one_step_after_the_other() -> None:
    assert answered(AheadRig(encode_layers_per_step=1)) == answered(Rig(encode_layers_per_step=1))


def test_a_token_follows_the_end_of_a_prompt_before_that_one_is_known() -> None:
    rig = AheadRig()
    add(rig, "a", 5, max_tokens=3)
    rig.step()
    rig.step()
    assert [rig.windows(plan) for plan in rig.plans] == [{"a": (0, 5)}, {"a": (5, 6)}]
    assert len(rig.under_way) == 1


def test_prompts_and_images_go_beside_what_was_planned_ahead() -> None:
    rig = AheadRig(encode_layers_per_step=1)
    add(rig, "a", 5, max_tokens=9)
    rig.step()
    rig.step()
    add(rig, "b", 3, FakeImage("p", 6), max_tokens=2)
    rig.step()
    decode, rest, ahead = rig.plans[-3:]
    assert [rig.windows(plan) for plan in (decode, rest, ahead)] == [{"a": (5, 6)}, {"b": (0, 3)}, {"a": (6, 7)}]
    assert rest.kind == "async_prefill" and len(rest.encode) == 1


def test_nothing_is_planned_beside_answers_that_are_alone() -> None:
    rig = AheadRig()
    add(rig, "a", 5, max_tokens=6)
    rig.finish()
    assert len(rig.plans) == 6


@pytest.mark.parametrize(
    "how",
    [{"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}, {"logprobs": 0}, {"min_tokens": 1}, {"structured": "{}"}],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_answers_that_need_the_host_for_each_token_are_not_planned_ahead(
    how: dict[str, Any], temperature: float
) -> None:
    rig = AheadRig()
    rig.add("a", 5, max_tokens=3, temperature=temperature, **how)
    rig.step()
    assert rig.scheduler.schedule_async_decode() is None


def test_drawn_answers_are_planned_ahead() -> None:
    rig = AheadRig()
    rig.add("a", 5, max_tokens=3, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1)
    rig.step()
    assert rig.scheduler.schedule_async_decode() is not None


def test_prompts_and_images_take_turns_beside_answers() -> None:
    rig = AheadRig(latency=PACE, layers=40)
    add(rig, "a", 2, max_tokens=30)
    rig.step()
    add(rig, "p", FakeImage("p", 4), max_tokens=2)
    add(rig, "t", 200, max_tokens=2)
    for _ in range(8):
        rig.step()
    kinds = [("layers" if plan.encode_layers else "tokens") for plan in rig.plans if plan.kind == "async_prefill"]
    assert kinds[1:7] in (["layers", "tokens"] * 3, ["tokens", "layers"] * 3)


def test_prompts_about_images_at_hand_cannot_keep_the_tower_from_a_new_one() -> None:
    rig = AheadRig(latency=PACE, layers=10)
    add(rig, "a", 2, max_tokens=99)
    add(rig, "h", FakeImage("h", 2), max_tokens=1)
    rig.step()
    add(rig, "p", FakeImage("p", 4), max_tokens=1)
    for number in range(40):
        add(rig, str(number), FakeImage("h", 2), [3_000 + number], max_tokens=1)
        rig.step()
    assert rig.finish_of("p") == "length"


def beside_an_answer(*images: FakeImage, latency: LatencyProfile = PACE) -> tuple[AheadRig, StepPlan]:
    """The first step that encodes something of these, each of a request of its own."""
    rig = AheadRig(latency=latency, layers=40)
    add(rig, "a", 2, max_tokens=99)
    rig.step()
    for image in images:
        add(rig, image.name, image, max_tokens=2)
    while not rig.plans[-1].encode and not (len(rig.plans) > 1 and rig.plans[-2].encode):
        rig.step()
    return rig, next(plan for plan in rig.plans if plan.encode)


def test_beside_answers_images_go_one_by_one_where_a_layer_over_more_takes_too_long() -> None:
    rig, plan = beside_an_answer(FakeImage("p", 4), FakeImage("q", 4))
    assert [item.key for item in plan.encode] == [key_of("p")]
    rig.finish()
    assert rig.runner.encoded == [key_of("p"), key_of("q")]


def test_beside_answers_the_image_that_comes_next_is_decoded_meanwhile() -> None:
    _, plan = beside_an_answer(FakeImage("p", 4), FakeImage("q", 4))
    assert [item.key for item in plan.prefetch] == [key_of("q")]


def test_beside_answers_a_image_alone_is_encoded_however_large() -> None:
    rig, plan = beside_an_answer(FakeImage("p", 400))
    assert len(plan.encode) == plan.encode_layers == 1
    rig.finish()
    assert rig.finish_of("p") == "length"


def test_a_image_that_a_step_starts_waits_for_its_layers_where_prompts_have_the_step() -> None:
    rig = AheadRig(latency=PACE, layers=40)
    add(rig, "a", 2, max_tokens=30)
    rig.step()
    rig.step()
    add(rig, "t", 20, max_tokens=2)
    add(rig, "p", 3, FakeImage("p", 4), max_tokens=2)
    rig.finish()
    started = next(plan for plan in rig.plans if plan.encode)
    assert started.windows and started.encode_layers == 0


def test_layers_of_a_step_are_counted_over_all_images_that_it_starts() -> None:
    latency = replace(PACE, layer_ms=((1, 0.1), (10, 1.0)))
    _, plan = beside_an_answer(*(FakeImage(name, 2) for name in "pqrs"), latency=latency)
    assert (len(plan.encode), plan.encode_layers) == (3, 2)


def test_a_request_that_lacks_blocks_gets_them_in_a_step_that_may_preempt() -> None:
    rig = AheadRig(num_blocks=6, block_size=4, max_num_batched_tokens=4, enable_prefix_caching=False)
    add(rig, "old", 15, max_tokens=2)
    add(rig, "young", 3, max_tokens=9)
    rig.finish()
    assert rig.finish_of("old") == rig.finish_of("young") == "length"
