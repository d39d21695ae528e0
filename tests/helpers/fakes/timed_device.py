"""A device that takes the time that an H200 was measured to take, for schedulers to plan with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from saccade.scheduler.latency_model import EncoderLoad, layer_ms, milliseconds
from saccade.types.latency import LatencyProfile
from saccade.types.step import StepPlan, StepResult
from tests.helpers.kernels.launching import Launching

LAYERS = 32
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
    encoder_layers=LAYERS,
)
RIDING = replace(
    PACE, mixed_ms=((32, ((128, 2.6), (256, 3.2), (384, 3.7), (512, 4.3))), (64, ((128, 2.9), (256, 3.5))))
)


class TimedDevice(Launching):
    """Works on what it is given in order; each piece takes what the pace says."""

    def __init__(self, *args: Any, per_image: int, **options: Any) -> None:
        super().__init__(*args, layers=LAYERS, **options)
        self.per_image = per_image  # embeddings
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
        return layers * layer_ms(PACE, EncoderLoad(self.per_image * len(flying), len(flying)))
