"""How many prompt tokens a step takes beside answers where they may ride along with these, and where they may not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.types.latency import LatencyProfile
from tests.helpers.engine.async_scheduling import ALONE, MIXED, RIDING, AheadRig, add
from tests.helpers.engine.scheduling import FakeImage, Part


def beside_an_answer(**changes: object) -> AheadRig:
    rig = AheadRig(**{"latency": MIXED, "enable_prefix_caching": False, "num_blocks": 600, **changes})
    add(rig, "answer", 5, max_tokens=60)
    rig.step()
    rig.step()
    return rig


def windows_of(rig: AheadRig, *names: str) -> list[list[int]]:
    """Tokens of these requests in each step that has any, until the last of them has its first."""
    while not all(name in rig.events for name in names):
        rig.step()
    windows = [
        [work for work in plan.windows if work.request_id in names and plan.kind == "async_prefill"]
        for plan in rig.plans
    ]
    return [[work.end - work.start for work in some] for some in windows if some]


@pytest.mark.parametrize(
    ("tokens", "windows"),
    [(30, [30]), (40, [24, 16]), (RIDING + 16, [RIDING, 16]), (200, [96, 88, 16]), (400, [96, 96, 96, 96, 16])],
)
def test_all_of_a_prompt_but_its_end_rides_along(tokens: int, windows: list[int]) -> None:
    rig = beside_an_answer()
    add(rig, "prompt", tokens, max_tokens=1)
    assert windows_of(rig, "prompt") == [[size] for size in windows]


def test_without_passes_for_both_a_prompt_goes_in_parts_that_fit_beside_the_answer() -> None:
    rig = beside_an_answer(latency=LatencyProfile(MIXED.decode_ms, MIXED.prefill_ms, MIXED.layer_ms, 2.5))
    add(rig, "prompt", 80, max_tokens=1)
    assert windows_of(rig, "prompt") == [[32], [32], [16]]


def test_nothing_rides_along_with_more_answers_than_a_pass_holds() -> None:
    rig = beside_an_answer(max_num_seqs=16)
    for name in "abcde":
        add(rig, name, [1], max_tokens=60)
    for _ in range(8):
        rig.step()
    add(rig, "prompt", 80, max_tokens=1)
    assert windows_of(rig, "prompt") == [[32], [32], [16]]


SHORTER = LatencyProfile(  # fewer ride along than go by themselves, in less time
    decode_ms=((1, 1.0), (16, 1.0)),
    prefill_ms=((32, 1.0), (64, 1.2), (96, 1.3)),
    layer_ms=((4, 0.5),),
    ceiling_ms=2.5,
    mixed_ms=((4, ((64, 1.4),)),),
)


@pytest.mark.parametrize(
    ("prompt", "windows"), [(80, [80]), (96, [96]), (97, [64, 33]), (200, [64, 64, 72]), (FakeImage("p", 80), [80])]
)
def test_a_prompt_that_can_end_does_though_fewer_tokens_would_ride_along(prompt: Part, windows: list[int]) -> None:
    rig = beside_an_answer(latency=SHORTER)
    add(rig, "prompt", prompt, max_tokens=1)
    assert windows_of(rig, "prompt") == [[size] for size in windows]


def test_where_a_prompt_ends_others_have_what_is_left_of_a_step_that_goes_by_itself() -> None:
    rig = beside_an_answer(latency=SHORTER)
    add(rig, "short", 20, max_tokens=1)
    add(rig, "long", 300, max_tokens=1)
    assert windows_of(rig, "short", "long")[0] == [20, 76]


def test_plans_say_what_rides_along() -> None:
    rig = beside_an_answer(latency=SHORTER)
    add(rig, "prompt", 200, max_tokens=1)
    windows_of(rig, "prompt")
    plans = [plan for plan in rig.plans if plan.kind == "async_prefill" and plan.windows]
    assert [plan.fuse_with_next for plan in plans] == [True, True, False]


def test_nothing_rides_along_where_one_pass_takes_longer_than_two() -> None:
    slow = replace(MIXED, mixed_ms=((4, ((16, 2.4), (RIDING, 2.5))),))  # tokens that fit, but 16 of them take 2 apart
    rig = beside_an_answer(latency=slow)
    add(rig, "picture", [1] * 8, FakeImage("p", 20), max_tokens=1)
    windows_of(rig, "picture")
    assert not any(plan.fuse_with_next for plan in rig.plans)


def test_text_that_can_end_in_a_step_does_though_a_image_might_ride_along() -> None:
    rig = beside_an_answer()
    add(rig, "picture", FakeImage("p", 300), max_tokens=1)
    while not rig.runner.encoded:
        rig.step()
    add(rig, "text", 20, max_tokens=1)
    rig.step()
    rig.step()
    assert len(rig.tokens_of("text")) == 1 and "picture" not in rig.events
    assert [12, 20] in windows_of(rig, "picture", "text")


def beside_works(rig: AheadRig) -> list[list[tuple[str, int, int]]]:
    windows = [
        [(work.request_id, work.start, work.end) for work in plan.windows]
        for plan in rig.plans
        if plan.kind == "async_prefill"
    ]
    return [some for some in windows if some]


def test_nothing_rides_along_in_a_step_that_ends_a_prompt_by_its_one_token_that_no_cache_has() -> None:
    rig = beside_an_answer(enable_prefix_caching=True)
    add(rig, "first", 33, max_tokens=1)
    windows_of(rig, "first")
    add(rig, "again", 33, max_tokens=1)
    add(rig, "long", [5_000 + i for i in range(200)], max_tokens=1)
    windows_of(rig, "again")
    assert [("again", 32, 33), ("long", 0, ALONE)] in beside_works(rig)


def test_nothing_rides_along_where_a_prompt_of_one_token_comes() -> None:
    rig = beside_an_answer()
    add(rig, "long", 200, max_tokens=1)
    add(rig, "one", [7], max_tokens=1)
    windows_of(rig, "one")
    assert [("long", 0, ALONE), ("one", 0, 1)] in beside_works(rig)


def test_nothing_rides_along_where_a_request_comes_after_which_no_step_is_planned_ahead() -> None:
    rig = beside_an_answer()
    rig.add("told", 200, max_tokens=1, temperature=0, logprobs=2)
    windows_of(rig, "told")
    assert beside_works(rig) == [[("told", 0, ALONE)]]


def test_a_request_that_finds_no_place_keeps_nobody_from_riding_along() -> None:
    rig = beside_an_answer(max_num_seqs=2)
    add(rig, "prompt", 200, max_tokens=1)
    rig.add("told", 20, max_tokens=1, temperature=0, logprobs=2)
    assert windows_of(rig, "prompt") == [[96], [88], [16]]


PROMPTS = st.lists(st.one_of(st.integers(2, 300), st.integers(1, 200).map(lambda n: FakeImage(f"p{n}", n))), max_size=5)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(PROMPTS, st.integers(0, 6), st.booleans())
def test_no_step_in_which_a_prompt_ends_has_more_tokens_than_fit_by_themselves(
    prompts: Sequence[Part], apart: int, caching: bool
) -> None:
    rig = beside_an_answer(enable_prefix_caching=caching)
    for number, part in enumerate(prompts):
        add(rig, f"r{number}", part, 3, max_tokens=2)
        for _ in range(apart):
            rig.step()
    rig.finish()
    for plan in rig.plans:
        if plan.kind == "async_prefill":
            sizes = [work.end - work.start for work in plan.windows]
            tokens = sum(size for size in sizes if size > 1)  # one is taken for an answer's
            assert tokens <= (ALONE if any(work.samples for work in plan.windows) else RIDING)
