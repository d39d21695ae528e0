"""What lies between two tokens of running answers, in the order in which the device is given its work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from saccade.engine.overlap_core import AsyncEngineCore
from saccade.scheduler.latency_model import SLOWDOWN, EncoderLoad, layer_ms, milliseconds
from saccade.types import LatencyProfile, StepPlan, StepResult
from tests.helpers.launching import Launching
from tests.helpers.scheduling import FakeImage, make_config, make_request

ANSWERS, EMBEDDINGS, LAYERS = 32, 1564, 32
PACE = LatencyProfile(  # as an H200 was measured with Qwen2-VL-2B's shape
    decode_ms=((1, 1.22), (16, 1.40), (32, 1.71), (40, 1.83), (64, 1.92)),
    prefill_ms=(
        (32, 1.75),
        (64, 1.87),
        (128, 2.01),
        (256, 2.65),
        (512, 3.42),
        (1024, 5.03),
        (2048, 9.15),
        (8192, 38.2),
    ),
    layer_ms=((256, 0.118), (1024, 0.454), (1521, 0.756), (2304, 1.356), (4096, 3.467)),
    ceiling_ms=20.0,
)
RIDING = replace(
    PACE, mixed_ms=((32, ((128, 2.6), (256, 3.2), (384, 3.7), (512, 4.3))), (64, ((128, 2.9), (256, 3.5))))
)


class Device(Launching):
    """Works on what it is given in order; each piece takes what the pace says."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.work: list[tuple[int, float]] = []  # answers that got a token, milliseconds
        self.latency = PACE

    def launch_both(
        self, beside: StepPlan, ahead: StepPlan
    ) -> tuple[Callable[[], StepResult], Callable[[], StepResult]]:
        collects = super().launch_both(beside, ahead)
        tokens, rows = sum(work.end - work.start for work in beside.windows), len(ahead.windows)
        curve = next(
            (curve for maximum, curve in self.latency.mixed_ms if rows <= maximum and tokens <= curve[-1][0]), None
        )
        if curve and beside.fuse_with_next:
            self.work[-2:] = [(rows, milliseconds(curve, tokens) + self._encode_ms(beside))]
        return collects

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        decoding = len(plan.decode)
        prompts = sum(work.end - work.start for work in plan.prefill)
        ms = milliseconds(PACE.decode_ms, decoding) if decoding else 0.0
        ms += milliseconds(PACE.prefill_ms, prompts) if prompts else 0.0
        self.work.append((decoding, ms + self._encode_ms(plan)))
        return super().launch(plan)

    def _encode_ms(self, plan: StepPlan) -> float:
        flying = {**self.flying, **{item.key: LAYERS for item in plan.encode}}
        if not flying or plan.encode_layers == 0:
            return 0.0
        layers = min(max(flying.values()), plan.encode_layers or LAYERS)
        return layers * layer_ms(PACE, EncoderLoad(EMBEDDINGS * len(flying), len(flying)))

    def between_tokens(self) -> list[float]:
        """Milliseconds, while all answers run."""
        gaps, so_far = [], 0.0
        for decoding, ms in self.work:
            so_far += ms
            if decoding >= ANSWERS:
                gaps.append(so_far)
            so_far = 0.0 if decoding else so_far
        return gaps


def played(latency: LatencyProfile, every: int) -> tuple[Device, dict[str, int]]:
    """Answers, with a picture every so many steps; and the step in which each picture's first token came."""
    config = make_config(
        latency=latency, max_num_seqs=64, max_num_batched_tokens=8192, encoder_budget=8192, encoder_cache_slots=60_000,
        num_blocks=40_000,
    )  # fmt: skip
    core, first = AsyncEngineCore(config, device := Device(config, layers=LAYERS)), dict[str, int]()
    device.latency = latency
    for i in range(ANSWERS):
        core.add(make_request(f"t{i}", 60, max_tokens=250, temperature=0, first_token=1_000 * i))
    core.step()
    for count in range(250):
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
    gaps = device.between_tokens()[1:]
    assert max(gaps) > 1.8 * alone, "something was done beside the answers"
    assert max(gaps) <= SLOWDOWN * alone


@pytest.mark.parametrize("every", [25, 60])
def test_images_that_keep_up_do_not_stretch_steps(every: int) -> None:
    device, _ = played(PACE, every)
    assert max(device.between_tokens()[1:]) <= SLOWDOWN * milliseconds(PACE.decode_ms, ANSWERS)


def test_images_that_queue_stretch_steps_up_to_the_ceiling_and_are_answered_sooner() -> None:
    gentle, late = played(replace(PACE, ceiling_ms=SLOWDOWN * milliseconds(PACE.decode_ms, ANSWERS)), 2)
    device, first = played(PACE, 2)
    assert max(gentle.between_tokens()[1:]) < max(device.between_tokens()[1:]) <= PACE.ceiling_ms
    assert len(first) > 2 * len(late) > 0
    assert all(first[name] <= late[name] for name in late)


def test_a_image_whose_prompt_rides_along_has_its_first_token_after_fewer_steps() -> None:
    _, apart = played(PACE, 60)
    _, riding = played(RIDING, 60)
    assert apart.keys() == riding.keys()
    assert all(riding[name] <= apart[name] - 8 for name in apart), (apart, riding)
