"""Puts an engine core together from options and a checkpoint folder, and says what was chosen and why."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from saccade.checkpoint.config import ModelConfig
from saccade.checkpoint.quantization import quantization_of
from saccade.engine.async_core import AsyncEngineCore
from saccade.engine.core import EngineCore
from saccade.engine.process_tuning import freeze, switch_threads_often
from saccade.engine.profiler import Profiler
from saccade.options.engine import Options, SchedulerConfig
from saccade.runner.build import EncoderLinks, build_runner
from saccade.runner.build_encoder import plan_encoder
from saccade.runner.device_memory import plan_memory
from saccade.runner.encoder.encoder_channel import Connect
from saccade.runner.forward import Forward
from saccade.runner.memory import Encoders
from saccade.runner.replica_placement import device_label, place
from saccade.runner.runner import Runner
from saccade.runner.torch_forward import TorchForward
from saccade.scheduler.cpu_step_time import CpuStepTime
from saccade.scheduler.latency_model import (
    CEILING_MS,
    EncoderLoad,
    milliseconds,
    min_restored,
    mixed_tokens,
    spare_ms,
    split_spare_time,
)
from saccade.types.latency import LatencyCurve, LatencyProfile, StepTime
from saccade.types.media import Geometry
from saccade.types.replica import Replica

logger = logging.getLogger("saccade.engine")


def build_core(
    path: Path,
    config: ModelConfig,
    image_processor: Mapping[str, Any],
    options: Options,
    largest: Geometry | None,
    *,
    progress: bool = True,
    replica: Replica = Replica(),  # noqa: B008 (immutable)
    connect: Connect | None = None,
) -> EngineCore:
    """`largest` is the most expensive image the limits allow: budget and cache are sized to hold it.

    `connect` opens the encoder workers that `replica` names.
    """
    placement = place(options, replica)
    options = placement.options
    links = None
    encoders = Encoders()
    if replica.encoders and connect:
        links = EncoderLinks(replica.encoders, connect, replica.count)
        each = plan_encoder(options, config, largest).total_bytes
        encoders = Encoders(len(replica.encoders), placement.encoders_beside * each)
    quantization = quantization_of(config.raw, path) if path else None
    plan = plan_memory(options, config, largest, None, placement.memory_parts, encoders, quantization)
    for reason in plan.reasons:
        logger.info("%s", reason)
    files = (path, config, image_processor)
    runner = build_runner(*files, options, plan, largest, progress=progress, links=links)
    if largest and runner.is_async:
        runner.warm_up(largest)
    limits, about_steps = _bounded(plan.scheduler, runner, options, largest)
    limits, about_offload = _offloading(limits, runner)
    limits, about_reach = _reaching(limits, runner)
    tiers = runner.open_tiers(largest) if largest else ()
    notes = [note for note in (runner.eager_reason, runner.grammars.problem, *tiers) if note]
    for note in notes:
        logger.info("%s", note)
    reasons = (*placement.reasons, *plan.reasons, *about_steps, *about_offload, *about_reach, *notes)
    device = device_label(runner.kv.k.device)
    more: dict[str, Any] = {"grammars": runner.grammars, "device": device}
    more["profiler"] = Profiler(options.profile_dir)
    if not runner.is_async:
        return EngineCore(limits, runner, reasons=reasons, **more)
    core = AsyncEngineCore(limits, runner, reasons=reasons, **more)
    freeze()
    switch_threads_often()
    return core


def _bounded(
    limits: SchedulerConfig, runner: Runner, options: Options, largest: Geometry | None
) -> tuple[SchedulerConfig, tuple[str, ...]]:
    """Limits on what a step may hold, from what this device was measured to do; and the reason."""
    forward = runner.forward
    seconds = options.max_step_seconds(runner.kv.k.device.type)
    if latency := forward.measure(runner.model, largest.grid if largest else None, options.inter_token_ms):
        limits = replace(limits, latency=latency)
        reason = _latency_reason(latency)
    elif seconds is not None and isinstance(forward, TorchForward):
        layers_per_s = 0.0
        if largest is not None and runner.encoder is not None:
            layers_per_s = 1 / max(runner.seconds_per_slice(largest.grid), 1e-6)
        time = StepTime(seconds, 1 / forward.seconds_per_prompt_token(), layers_per_s)
        limits = replace(limits, step_time=time)
        reason = _step_reason(time, limits.max_num_batched_tokens, options)
    else:
        return limits, ()
    logger.info("%s", reason)
    return limits, (reason,)


def _offloading(limits: SchedulerConfig, runner: Runner) -> tuple[SchedulerConfig, tuple[str, ...]]:
    """From how many KV blocks on host memory is faster than prefill on this device; and the reason."""
    if runner.host_blocks is None:
        return limits, ()
    copy_ms = runner.host_blocks.measure()
    prefill_ms = _prefill_curve(limits, runner.forward)
    fewest = min_restored(prefill_ms, copy_ms, limits.block_size)
    count, ms = copy_ms[-1]
    computed_ms = milliseconds(prefill_ms, count * limits.block_size)
    reason = f"{count} KV blocks take {ms:.2f} ms from host memory and {computed_ms:.2f} ms of prefill: "
    if fewest is None:
        runner.drop_host_blocks()
        limits = replace(limits, host_blocks=0)
        reason += "KV offload is off, since computing is faster"
    else:
        rate = runner.host_blocks.block_bytes * count / ms / 1e6
        limits = replace(limits, min_restored_blocks=fewest, restore_ms_per_block=ms / count)
        reason += f"{fewest} or more are restored, at {rate:.1f} GB/s; fewer are computed"
    logger.info("%s", reason)
    return limits, (reason,)


def _reaching(limits: SchedulerConfig, runner: Runner) -> tuple[SchedulerConfig, tuple[str, ...]]:
    """How far back the layers read, where no request is so short; and the reason."""
    reach = runner.reach
    if reach is None or reach.tokens >= limits.max_model_len:
        return limits, ()
    what = "its prompt and the last" if reach.has_prompt else "the last"
    reason = f"a request keeps the KV blocks of {what} {reach.tokens} tokens: no layer reads further back"
    logger.info("%s", reason)
    return replace(limits, reach=reach), (reason,)


def _prefill_curve(limits: SchedulerConfig, forward: Forward) -> LatencyCurve:
    if limits.latency:
        return limits.latency.prefill_ms
    assert isinstance(forward, TorchForward)
    ms = forward.seconds_per_prompt_token() * 1e3
    return ((1, ms), (limits.max_num_batched_tokens + 1, ms * (limits.max_num_batched_tokens + 1)))


def _step_reason(time: StepTime, max_tokens: int, options: Options) -> str:
    step = CpuStepTime(time, max_tokens, options.encode_layers_per_step)
    return (
        f"{step.tokens(0)} tokens or {step.layers} encoder layers a step at first: {time.seconds * 1e3:.0f} "
        f"ms at {time.prompt_tokens_per_s:.0f} prompt tokens a second; later steps tell how fast it really is"
    )


def _latency_reason(latency: LatencyProfile) -> str:
    many, alone = latency.decode_ms[-1]
    spare = spare_ms(latency, many)
    tokens, layers = split_spare_time(latency, spare, EncoderLoad(1024, 1))
    mixed = mixed_tokens(latency, many, spare) or tokens
    return (
        f"a step of {many} answers takes {alone:.2f} ms alone; beside them {mixed} prompt tokens ({tokens} "
        f"where a prompt ends) or {layers} encoder layers over an image of 1024 embeddings fit; when more "
        f"queues a step may take {latency.ceiling_ms or CEILING_MS:g} ms"
    )
