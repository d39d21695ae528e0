"""How a step is shared between decoding, text prompts and prompts with pictures."""

from __future__ import annotations

from typing import Any

import pytest

from saccade.scheduler.latency_model import EncoderLoad
from saccade.scheduler.step_policy import StepDemand
from saccade.types.latency import LatencyProfile
from tests.helpers.engine.scheduling import FakeImage, Rig

LARGE = FakeImage("large", 40)


def text_first(**changes: object) -> Rig:
    values = {"max_num_batched_tokens": 16, "is_bounded": True, "encode_layers_per_step": 1}
    return Rig(**{**values, **changes})


def test_decoding_gets_its_token_though_an_earlier_prompt_could_fill_the_step() -> None:
    rig = Rig(max_num_batched_tokens=16, is_bounded=True, encode_layers_per_step=1)
    rig.add("early", FakeImage("huge", 200), max_tokens=1)
    rig.add("late", 1, max_tokens=30, first_token=500)
    rig.drain()
    steps = [plan.step for plan in rig.plans if "late" in rig.windows(plan)]
    assert steps == list(range(1, 31))
    assert any(rig.windows(plan).get("early") == (0, 15) for plan in rig.plans)


def test_text_that_comes_behind_images_gets_the_next_step_but_for_their_share() -> None:
    rig = Rig(max_num_batched_tokens=16, latency=LatencyProfile(((1, 1.0),), ((16, 1.0),), (), None))
    rig.latency_bounded = False
    for name in "abc":
        rig.add(name, FakeImage(name, 40), 4)
    rig.step()
    rig.add("text", 12, max_tokens=1, first_token=500)
    windows = rig.windows(rig.step())
    assert windows["text"] == (0, 12)
    assert windows["a"] == (16, 20)  # a quarter of the step
    assert rig.finish_of("text") == "length"


def test_no_more_prompts_go_into_a_step_than_are_computed_together() -> None:
    latency = LatencyProfile(
        decode_ms=((1, 1.0),), prefill_ms=((16, 1.0),), layer_ms=(), ceiling_ms=2.5, max_prefills=2
    )
    rig = Rig(latency=latency)
    rig.latency_bounded = False
    for name in "abcde":
        rig.add(name, 3, max_tokens=3)
    assert [len(rig.windows(rig.step())) for _ in range(3)] == [2, 4, 5]


def test_without_text_first_the_image_fills_the_step() -> None:
    rig = Rig(max_num_batched_tokens=16)
    rig.add("picture", FakeImage("p", 40), 4)
    rig.step()
    rig.add("text", 12, first_token=500)
    assert set(rig.windows(rig.step())) == {"picture"}


def test_images_go_on_under_a_flood_of_text() -> None:
    rig = text_first(max_num_seqs=64)
    rig.add("picture", LARGE, 4, max_tokens=1)
    for step in range(200):
        rig.add(f"text{step}", 16, max_tokens=1, first_token=1000 + 20 * step)
        rig.step()
        if "picture" in rig.events:
            break
    assert rig.finish_of("picture") == "length"


def test_the_encoder_pauses_while_text_waits_for_its_first_token() -> None:
    rig = text_first()
    rig.add("picture", LARGE, 4)
    first = rig.step()
    rig.add("text", 40, max_tokens=4, first_token=500)
    layers = [rig.step().encode_layers for _ in range(4)]
    assert first.encode_layers == 1
    assert layers == [0, 0, 0, 1]  # the prompt of 40 takes three steps


def test_slices_are_used_when_nobody_decodes_if_always_is_set() -> None:
    rig = text_first(layers=3)
    rig.add("picture", LARGE, max_tokens=1)
    assert [rig.step().encode_layers for _ in range(3)] == [1, 1, 1]
    assert not rig.plans[0].windows  # nothing to compute before the picture is there
    rig.drain()
    assert rig.finish_of("picture") == "length"


@pytest.mark.parametrize(
    ("limits", "needed"),
    [
        ({"max_num_batched_tokens": 30}, 3),
        ({"max_num_seqs": 2}, 2),
        ({"latency": LatencyProfile(((1, 1.0),), ((8, 1.0),), (), None, max_prefills=4)}, 4),
    ],
)
def test_a_step_is_full_when_its_tokens_its_places_or_its_prompts_are_taken(
    limits: dict[str, Any], needed: int
) -> None:
    rig = Rig(**limits)
    fullness = []
    for name in "abcd":
        rig.add(name, 10)
        fullness.append(rig.scheduler.fills_step())
    assert fullness == [count >= needed for count in range(1, 5)]


def test_the_backlog_is_of_requests_with_a_seat_and_holds_each_image_once(monkeypatch: pytest.MonkeyPatch) -> None:
    latency = LatencyProfile(((1, 1.0),), ((64, 1.0),), ((4, 0.1),), ceiling_ms=2.5)
    rig = Rig(latency=latency, max_num_seqs=3, encoder_budget=4)
    rig.add("text", 2, max_tokens=30)
    rig.step()
    demands: list[StepDemand] = []
    limits = rig.scheduler.policy.limits
    monkeypatch.setattr(rig.scheduler.policy, "limits", lambda demand: demands.append(demand) or limits(demand))
    for name in ("a", "b", "c", "d"):
        rig.add(name, FakeImage("same" if name in "ab" else name, 4), 3, first_token=500)
    rig.step()
    found = demands[0]
    assert (found.decoding, found.waiting) == (1, 2), "three seats, one of which is taken"
    assert found.prompt_tokens == 2 * 7
    assert found.queued == EncoderLoad(4, 1)
