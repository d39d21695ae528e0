"""What lies between two tokens of running answers, in the order in which the device is given its work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from saccade.engine.async_core import AsyncEngineCore
from saccade.scheduler.latency_model import SLOWDOWN, milliseconds
from saccade.types.latency import LatencyProfile
from tests.helpers.engine.scheduling import FakeImage, make_config, make_request
from tests.helpers.fakes.timed_device import PACE, RIDING, TimedDevice

ANSWERS, EMBEDDINGS = 32, 1564


def between_tokens(device: TimedDevice) -> list[float]:
    """Milliseconds, while all answers run."""
    gaps, so_far = [], 0.0
    for decoding, ms in device.work:
        so_far += ms
        if decoding >= ANSWERS:
            gaps.append(so_far)
        so_far = 0.0 if decoding else so_far
    return gaps


def played(latency: LatencyProfile, every: int, steps: int = 250) -> tuple[TimedDevice, dict[str, int]]:
    """Answers, with a picture every so many steps; and the step in which each picture's first token came."""
    config = make_config(
        latency=latency, max_num_seqs=64, max_num_batched_tokens=8192, encoder_budget=8192, encoder_cache_slots=60_000,
        num_blocks=40_000,
    )  # fmt: skip
    core, first = AsyncEngineCore(config, device := TimedDevice(config, per_image=EMBEDDINGS)), dict[str, int]()
    device.latency = latency
    for i in range(ANSWERS):
        core.add(make_request(f"t{i}", 60, max_tokens=250, temperature=0, first_token=1_000 * i))
    core.step()
    for count in range(steps):
        if count % every == 0 and 0 < count < 200:
            image = FakeImage(f"p{count}", EMBEDDINGS)
            core.add(make_request(f"p{count}", 8, image, 6, max_tokens=2, temperature=0, first_token=100_000))
        for event in core.step():
            if event.request_id.startswith("p"):
                first.setdefault(event.request_id, count)
    core.scheduler.check()
    return device, first


@pytest.mark.parametrize("latency", [PACE, RIDING], ids=["apart", "riding"])
@pytest.mark.parametrize("every", [10, 25, 60])
def test_prompts_and_images_in_turns_never_share_the_time_between_two_tokens(
    latency: LatencyProfile, every: int
) -> None:
    alone = milliseconds(PACE.decode_ms, ANSWERS)
    device, _ = played(replace(latency, ceiling_ms=SLOWDOWN * alone), every)
    gaps = between_tokens(device)[1:]
    assert max(gaps) > 1.8 * alone, "something was done beside the answers"
    assert max(gaps) <= SLOWDOWN * alone


@pytest.mark.parametrize("every", [25, 60])
def test_images_that_keep_up_do_not_stretch_steps(every: int) -> None:
    device, _ = played(PACE, every)
    assert max(between_tokens(device)[1:]) <= SLOWDOWN * milliseconds(PACE.decode_ms, ANSWERS)


def test_images_that_queue_stretch_steps_up_to_the_ceiling_and_are_answered_sooner() -> None:
    gentle, late = played(replace(PACE, ceiling_ms=SLOWDOWN * milliseconds(PACE.decode_ms, ANSWERS)), 2, steps=100)
    device, first = played(PACE, 2, steps=100)
    assert max(between_tokens(gentle)[1:]) < max(between_tokens(device)[1:]) <= PACE.ceiling_ms
    assert len(first) > 2 * len(late) > 0
    assert all(first[name] <= late[name] for name in late)


def test_a_image_whose_prompt_rides_along_has_its_first_token_after_fewer_steps() -> None:
    _, apart = played(PACE, 60)
    _, riding = played(RIDING, 60)
    assert apart.keys() == riding.keys()
    assert all(riding[name] <= apart[name] - 8 for name in apart), (apart, riding)
