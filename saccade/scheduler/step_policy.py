"""How much one step may do: a policy, chosen once when the engine is built.

throughput   whole images and as many tokens as fit                      offline on a CPU
bounded      tokens and encoder layers that fit into a step's time       serving on a CPU
latency      what fits beside running decodes, more when more waits      GPU

A policy turns demand into limits. It knows neither requests nor blocks, and reads no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from saccade.options.engine import SchedulerConfig
from saccade.scheduler.cpu_step_time import CpuStepTime
from saccade.scheduler.latency_model import (
    EncoderLoad,
    backlog_ms,
    max_restored,
    max_work,
    mixed_is_faster,
    mixed_tokens,
    spare_ms,
    split_spare_time,
)
from saccade.types.latency import LatencyProfile
from saccade.types.step import StepPlan, StepResult

IMAGE_SHARE = 4  # images keep a quarter of a step's tokens, and some encoding in every fourth step


_ALL_LAYERS = 1 << 16  # of the vision tower, for as many images as there are


class StepDemand(NamedTuple):
    """What open requests want of the next step."""

    step: int  # its number
    decoding: int  # requests
    text_decoding: int  # of those, requests without images
    waiting: int  # requests without a first token that have a seat, or find one
    prompts: int  # requests that could prefill now, as far as images are concerned
    text_tokens: Mapping[str, int]  # prefill tokens of requests that wait for no image, by tenant
    text_before_images: int  # of those, of tenants not after the first one that waits for the encoder
    prompt_tokens: int  # of those, all that are not computed
    waiting_work: int  # embeddings of the first image that a request waits for
    queued: EncoderLoad  # of those, images that no encoder works on
    in_flight: EncoderLoad  # images that the engine's own encoder works on
    can_fuse: bool  # prefill may be fused with the next decode step
    latency_bounded: bool  # tokens are wanted as they come, not only whole outputs
    has_workers: bool = False  # encoder workers are up: only what is `in_flight` is encoded by steps


class StepLimits(NamedTuple):
    tokens: int  # of decode and prefill together
    prefill_tokens: int | None = None  # where a prompt ends in the step; None: what decode leaves
    mixed_tokens: int = 0  # prefill tokens where none ends and all are fused with the next decode step
    max_prefills: int | None = None
    encode_layers: int | None = None  # None: the step finishes the images it starts
    max_encode_in_flight: int | None = None  # embeddings made at a time; None: the encoder budget
    text_first: bool = False  # of a tenant's prompts those without images go before those with images
    skip_decode: bool = False  # only encode: decoding requests sit this step out
    max_restored_blocks: int | None = None  # copied from host memory; None: as many as are there


class StepPolicy(Protocol):
    def limits(self, demand: StepDemand) -> StepLimits: ...

    def encode_layers(
        self, limits: StepLimits, demand: StepDemand, num_prefills: int, load: EncoderLoad
    ) -> int | None:
        """Layers to advance, once it is known what the step computes, and that `load` is in flight then."""

    def fuses(self, demand: StepDemand, prefill_tokens: int) -> bool:
        """Whether these prefill tokens are fused with the next decode step."""

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """A step took so long."""


def make_policy(config: SchedulerConfig) -> StepPolicy:
    policy = _own_policy(config)
    return WorkersPolicy(policy) if config.num_encoders else policy


def _own_policy(config: SchedulerConfig) -> StepPolicy:
    if config.latency is not None:
        return LatencyPolicy(
            config.latency, config.max_num_batched_tokens, restore_ms=config.restore_ms_per_block
        )
    if config.step_time is not None:
        time = CpuStepTime(config.step_time, config.max_num_batched_tokens, config.encode_layers_per_step)
        return BoundedStepPolicy(time)
    return ThroughputPolicy(config.max_num_batched_tokens, config.encode_layers_per_step)


class ThroughputPolicy:
    def __init__(self, max_tokens: int, layers: int | None) -> None:
        self._max_tokens = max_tokens
        self._layers = layers  # of the encoder in a step beside decodes, if the operator bounds them

    def limits(self, demand: StepDemand) -> StepLimits:
        return StepLimits(self._max_tokens, encode_layers=self._layers if demand.decoding else None)

    def encode_layers(
        self, limits: StepLimits, demand: StepDemand, num_prefills: int, load: EncoderLoad
    ) -> int | None:
        return limits.encode_layers

    def fuses(self, demand: StepDemand, prefill_tokens: int) -> bool:
        return False

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None: ...


class BoundedStepPolicy(ThroughputPolicy):
    """Every step keeps to a time, also when none decodes: a new request waits for one step at most."""

    def __init__(self, time: CpuStepTime) -> None:
        self.time = time

    def limits(self, demand: StepDemand) -> StepLimits:
        layers = self._layers_now(demand)
        # A decode step costs a CPU as much for a few requests as for many. Image requests wait for images, so
        # they skip steps that only encode. Text requests never do, and none does beside prefill.
        uses_decoder = demand.prompts + demand.text_decoding > 0
        encodes = min(layers, demand.in_flight.images) > 0
        return StepLimits(
            self.time.tokens(demand.decoding),
            encode_layers=layers,
            text_first=True,
            skip_decode=encodes and not uses_decoder and demand.step % IMAGE_SHARE != 0,
        )

    def _layers_now(self, demand: StepDemand) -> int:
        if demand.text_before_images and demand.step % IMAGE_SHARE:
            return 0  # text waits for its first token
        if not demand.prompts:
            return self.time.layers
        return self.time.layers // 2 or 1 - demand.step % 2

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        if not result.failed:
            prefill_tokens = sum(window.end - window.start for window in plan.prefill)
            self.time.observe(len(plan.decode), prefill_tokens, result.slice, seconds)


class LatencyPolicy(ThroughputPolicy):
    """Beside decodes, prefill and encoding get some time, by what waits; else all they want."""

    def __init__(self, profile: LatencyProfile, max_tokens: int, restore_ms: float = 0.0) -> None:
        self.profile = profile
        self._restore_ms = restore_ms  # of a KV block that comes from host memory
        self._max_tokens = max_tokens
        self._is_prefill_turn = False  # where prefill and encoding alternate

    def limits(self, demand: StepDemand) -> StepLimits:
        free = StepLimits(self._max_tokens, max_prefills=self.profile.max_prefills, text_first=True)
        if not demand.latency_bounded or not demand.decoding:
            return free
        spare = self._spare_ms(demand)
        load = max(demand.in_flight, EncoderLoad(demand.waiting_work, 1))
        prefill_tokens, layers = split_spare_time(self.profile, spare, load)
        # Prefill reads all weights however short it is, so it and encoding alternate. A request whose image
        # has just become resident counts as waiting, so encoding always gets the step after a prefill step.
        if (load.embeddings and demand.prompts) or (demand.in_flight.images and self._is_prefill_turn):
            self._is_prefill_turn = not self._is_prefill_turn
            prefill_tokens, layers = (prefill_tokens, 0) if self._is_prefill_turn else (0, layers)
        can_fuse = demand.can_fuse and prefill_tokens > 0
        return free._replace(
            prefill_tokens=prefill_tokens,
            mixed_tokens=mixed_tokens(self.profile, demand.decoding, spare) if can_fuse else 0,
            encode_layers=layers,
            max_encode_in_flight=max_work(self.profile, spare),
            max_restored_blocks=max_restored(spare, self._restore_ms),
        )

    def encode_layers(
        self, limits: StepLimits, demand: StepDemand, num_prefills: int, load: EncoderLoad
    ) -> int | None:
        """All images in flight may go through the tower together. None advances beside prefill."""
        if not (limits.encode_layers and load.images):
            return limits.encode_layers
        self._is_prefill_turn = num_prefills > 0
        if self._is_prefill_turn:
            return 0
        return split_spare_time(self.profile, self._spare_ms(demand), load).encode_layers

    def _spare_ms(self, demand: StepDemand) -> float:
        backlog = backlog_ms(self.profile, demand.prompt_tokens, demand.in_flight.plus(demand.queued))
        return spare_ms(self.profile, demand.decoding, demand.waiting, backlog)

    def fuses(self, demand: StepDemand, prefill_tokens: int) -> bool:
        return mixed_is_faster(self.profile, demand.decoding, prefill_tokens)


class WorkersPolicy:
    """Another policy, beside encoder workers: no step waits for their embeddings or keeps time for them."""

    def __init__(self, inner: StepPolicy) -> None:
        self._inner = inner

    def limits(self, demand: StepDemand) -> StepLimits:
        if not demand.has_workers:
            return self._inner.limits(demand)
        limits = self._inner.limits(
            demand._replace(waiting_work=demand.in_flight.embeddings, queued=EncoderLoad())
        )
        layers = _ALL_LAYERS if limits.encode_layers is None else limits.encode_layers
        return limits._replace(encode_layers=layers, max_encode_in_flight=None)

    def encode_layers(
        self, limits: StepLimits, demand: StepDemand, num_prefills: int, load: EncoderLoad
    ) -> int | None:
        if limits.encode_layers == _ALL_LAYERS:
            return _ALL_LAYERS
        if demand.has_workers:
            demand = demand._replace(queued=EncoderLoad())
        return self._inner.encode_layers(limits, demand, num_prefills, load)

    def fuses(self, demand: StepDemand, prefill_tokens: int) -> bool:
        return self._inner.fuses(demand, prefill_tokens)

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        self._inner.observe(plan, result, seconds)
