"""`saccade bench --calibrate`: measures an engine on this machine, for `saccade plan --calibration`."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from saccade import LLM, SamplingParams, costs
from saccade.apps.bench.workloads import jpeg
from saccade.apps.plan.calibration import calibration_for
from saccade.apps.plan.fit import Figure, fit
from saccade.apps.plan.hardware import Hardware
from saccade.apps.plan.timing import Precision, TimeModel
from saccade.media.decode import decode
from saccade.processor.images import ImageInput
from saccade.runner.device_memory import device_of, dtype_of
from saccade.runner.device_peaks import MeasuredDevice, measure_device
from saccade.types.media import MediaItem
from saccade.util.plain_files import write_whole

_REPEATS = 3
_STEPS = 32  # of decode
_MANY = {"cuda": 32, "cpu": 8}  # requests that decode together
_CONTEXT = 1000  # tokens before them, if the model takes so many
_TEXTS = (64, 1600)
_SIZES = {"cuda": (1280, 960), "cpu": (640, 480)}


def calibrate(file: Path, model: str | None, options: Mapping[str, str]) -> int:
    """`options` of the engine, beside its model."""
    device = device_of("auto")
    hardware = _hardware(measure_device(device), device.type)
    with LLM(model=model, use_tqdm=False, **options) as llm:
        config = llm.engine.processor.checkpoint.config
        dtype, _ = dtype_of(options.get("dtype", "auto"), config.dtype, device)
        size = costs.dtype_bytes(dtype)
        timing = TimeModel(config, dtype, hardware, calibration_for(hardware), Precision(size, size))
        figures = list(_figures(llm, device.type))
        if config.vision is not None:
            megapixel_ms = _megapixel_ms(llm, device.type)
            timing = replace(timing, calibration=replace(timing.calibration, megapixel_ms=megapixel_ms))
            figures.append(_new_image(llm, device.type))
    name = "the built-in model" if model is None else model
    speed = f"{hardware.bandwidth_gb_s:g} GB/s, {hardware.tflops:g} TFLOP/s"
    source = f"measured with {name} on {hardware.name}, {speed}"
    calibration = replace(fit(timing, figures), source=source)
    for figure in figures:
        predicted = figure.predict(replace(timing, calibration=calibration)) * 1e3
        print(f"{figure.name:<32}{figure.seconds * 1e3:10.2f} ms measured {predicted:10.2f} ms predicted")
    write_whole(file, json.dumps({"hardware": asdict(hardware), **asdict(calibration)}, indent=1) + "\n")
    print(f"written: {file}; saccade plan MODEL --calibration {file} uses it")
    return 0


def _hardware(measured: MeasuredDevice, device: str) -> Hardware:
    return Hardware(
        name=measured.name,
        memory_gib=round(measured.memory_bytes / costs.GIB, 2),
        bandwidth_gb_s=round(measured.peaks.bytes_per_s / 1e9, 1),
        tflops=round(measured.peaks.flops / 1e12, 3),
        has_fp8=measured.has_fp8,
        is_cpu=device == "cpu",
    )


def _figures(llm: LLM, device: str) -> Iterator[Figure]:
    longest = llm.engine.limits.max_model_len
    context = min(_CONTEXT, longest // 2 - _STEPS)
    for batch in (1, _MANY[device]):
        yield _decode(llm, batch, context)
    for tokens in sorted({min(tokens, longest - 1) for tokens in _TEXTS}):
        yield _text(llm, tokens)


def _decode(llm: LLM, batch: int, context: int) -> Figure:
    """The warm-up leaves the prompts in the prefix cache: what is subtracted is short."""
    prompts = [_prompt(llm, context) for _ in range(batch)]
    once = _median(lambda: _generate(llm, prompts, 1))
    often = _median(lambda: _generate(llm, prompts, 1 + _STEPS))
    step = max((often - once) / _STEPS, 1e-6)
    return Figure(f"decode of {batch}", step, lambda timing: timing.decode(batch, context + _STEPS // 2))


def _text(llm: LLM, tokens: int) -> Figure:
    seconds = _median(lambda: _generate(llm, [_prompt(llm, tokens)], 1))
    name = f"first token, text of {tokens}"
    return Figure(name, seconds, lambda timing: timing.prefill(tokens) + timing.request)


def _new_image(llm: LLM, device: str) -> Figure:
    item = _item(llm, device, seed=0)
    placeholder = llm.engine.processor.placeholder
    dice = random.Random(1)

    def ask() -> float:
        data = jpeg(_SIZES[device], dice)
        return _generate(llm, [{"prompt": placeholder, "multi_modal_data": {"image": data}}], 1)

    width, height = _SIZES[device]

    def predict(timing: TimeModel) -> float:
        work = timing.encode(item.geometry) + timing.prefill(item.geometry.tokens)
        return timing.preprocess(width * height / 1e6) + work + timing.request

    return Figure(f"first token, JPEG of {width}x{height}", _median(ask), predict)


def _megapixel_ms(llm: LLM, device: str) -> float:
    """Decoding a JPEG on one core, for each megapixel."""
    item = _item(llm, device, seed=2)
    width, height = _SIZES[device]

    def once() -> float:
        start = time.perf_counter()
        decode(item)
        return time.perf_counter() - start

    return _median(once) * 1e3 / (width * height / 1e6)


def _item(llm: LLM, device: str, seed: int) -> MediaItem:
    images = llm.engine.processor.images
    return images.item(ImageInput(jpeg(_SIZES[device], random.Random(seed)), "image"), images.limits)


def _prompt(llm: LLM, tokens: int) -> dict[str, object]:
    """Ids of ordinary tokens, which are the first of a vocabulary."""
    highest = llm.engine.processor.checkpoint.config.text.vocab_size // 2
    return {"prompt_token_ids": [random.randrange(highest) for _ in range(tokens)]}


def _generate(llm: LLM, prompts: list[dict[str, object]], tokens: int) -> float:
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - start


def _median(measure: Callable[[], float]) -> float:
    measure()  # warm-up
    return statistics.median(measure() for _ in range(_REPEATS))
