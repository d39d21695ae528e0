"""The H200's calibration predicts what was measured on one within a fifth."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from saccade.apps.plan.calibration import calibration_for, read_calibration
from saccade.apps.plan.hardware import find_hardware
from saccade.apps.plan.model_cards import read_card
from saccade.apps.plan.timing import Precision, TimeModel, tower_flops
from saccade.apps.plan.workload import Workload, request_cost
from saccade.errors import ConfigError
from saccade.options.engine import Options
from saccade.processor.checkpoint_files import Checkpoint
from saccade.types.media import Geometry
from tests.helpers.engine.plans import planned, sizes

WITHIN = 0.2


class Measured(NamedTuple):
    """ms, and images/s; docs/experiments/038 and 039, of the 7B shapes 025."""

    decode_1: float
    decode_32: float
    text_1600: float
    jpeg_1280x960: float
    images_per_s: float
    requests: int = 32  # of one 720p image each, for the last


H200 = {
    "Qwen/Qwen3-VL-2B": Measured(1.42, 2.26, 10.6, 29.0, 67.2),
    "Qwen/Qwen3-VL-8B": Measured(4.15, 5.61, 39.3, 48.8, 27.9),
    "Qwen/Qwen3-VL-30B-A3B": Measured(2.71, 13.9, 34.2, 49.4, 36.8),
    "Qwen/Qwen3.5-9B": Measured(4.22, 5.45, 42.2, 54.5, 26.7),
    "Qwen/Qwen3.5-27B": Measured(14.9, 17.7, 137, 129, 9.8),
    "Qwen/Qwen3.5-35B-A3B": Measured(2.42, 12.4, 38.0, 55.2, 28.2),
    "deepseek-ai/deepseek-vl2-small": Measured(2.21, 8.59, 21.6, 45.8, 28.6),
    "mistralai/Ministral-3-8B": Measured(4.22, 5.54, 41.4, 72.9, 20.1),
    "meta-llama/Llama-3.2-11B-Vision": Measured(3.99, 5.25, 40.3, 70.9, 11.5),
    "Qwen/Qwen2-VL-2B": Measured(1.19, 1.53, 8.93, 43.7, 40.6, 64),
    "Qwen/Qwen2.5-VL-7B": Measured(3.8, 4.6, 35.3, 56, 23.2, 64),
    "llava-hf/llava-1.5-7b": Measured(3.8, 8.0, 38.3, 22.5, 54.0, 64),
}
OUTSIDE = {
    # 27 predicted. Not explained: perhaps its 32 prompts, alike and with random weights, choose fewer experts.
    ("Qwen/Qwen3-VL-30B-A3B", "images_per_s"),
    # 20 predicted. 8 images are pinned at a time, which `saccade plan` names; in waves of 8 it would be 15.5.
    ("meta-llama/Llama-3.2-11B-Vision", "images_per_s"),
}
SHAPES = {name: {"text_config": {"vocab_size": 151936}} for name in H200 if "Qwen3.5" in name}  # as they were measured


def timing(checkpoint: Checkpoint, gpu: str = "h200") -> TimeModel:
    hardware = find_hardware(gpu)
    return TimeModel(checkpoint.config, "bfloat16", hardware, calibration_for(hardware), Precision(2, 2))


def geometry(checkpoint: Checkpoint, size: tuple[int, int]) -> Geometry:
    """Under the limit of the runs."""
    options = Options(max_pixels=2560 * 1440)
    return request_cost(checkpoint, options, Workload(sizes=sizes(size))).images[0].geometry


def predicted(name: str) -> Measured:
    checkpoint = read_card(name, SHAPES.get(name, {}))
    images = timing(checkpoint)
    text = replace(images, has_images=False)
    photo, hd = (geometry(checkpoint, size) for size in ((1280, 960), (1280, 720)))
    new = images.preprocess(1.2288) + images.encode(photo) + images.prefill(photo.tokens + 12) + images.request
    number = H200[name].requests
    work = images.encode(hd) + images.prefill_among(hd.tokens + 10, 8192)
    wave = number * work + 31 * images.decode(number, hd.tokens + 26) + images.preprocess(0.9216) + images.request
    ms = (text.decode(1, 1032), text.decode(32, 1032), text.prefill(1600) + text.request, new)
    return Measured(*(1e3 * seconds for seconds in ms), number / wave, number)


@pytest.mark.parametrize("figure", Measured._fields[:5])
@pytest.mark.parametrize("name", H200)
def test_the_h200_calibration_predicts_what_was_measured(name: str, figure: str) -> None:
    ratio = getattr(predicted(name), figure) / getattr(H200[name], figure)
    is_near = abs(ratio - 1) <= WITHIN
    assert is_near == ((name, figure) not in OUTSIDE), f"{ratio:.2f} times what was measured"


def test_fp8_weights_take_what_was_measured() -> None:
    """docs/experiments/048."""
    made = replace(timing(read_card("Qwen/Qwen3-VL-8B")), precision=Precision(1, 2, fp8_params=1))
    found = (made.decode(1, 1000), made.decode(32, 1000), made.prefill(1600) + made.request)
    assert [1e3 * seconds for seconds in found] == pytest.approx([3.03, 4.99, 29.3], rel=WITHIN)


def test_large_batches_decode_as_measured() -> None:
    """README.md and docs/experiments/025: 128 requests at 1k context."""
    for name, ms in (("Qwen/Qwen2-VL-2B", 2.77), ("Qwen/Qwen2.5-VL-7B", 6.8), ("llava-hf/llava-1.5-7b", 24.1)):
        assert timing(read_card(name)).decode(128, 1032) * 1e3 == pytest.approx(ms, rel=WITHIN)


def test_a_pass_never_takes_less_than_its_bytes_or_its_flops() -> None:
    checkpoint = read_card("Qwen/Qwen3-VL-8B")
    for gpu in ("l4", "a100-80", "h200", "b200"):
        hardware = find_hardware(gpu)
        made = timing(checkpoint, gpu)
        assert made.decode(1, 1000) > 15.1e9 / hardware.bandwidth_gb_s / 1e9
        assert made.prefill(4000) > 2 * 4000 * 6.9e9 / hardware.tflops / 1e12


def test_prompts_in_full_steps_take_less_than_one_by_one() -> None:
    made = timing(read_card("Qwen/Qwen3-VL-30B-A3B"))
    assert made.prefill_among(256, 8192) < made.prefill(256) / 2


def test_tiles_of_one_size_attend_to_themselves_alone() -> None:
    config = read_card("deepseek-ai/deepseek-vl2-small").config
    assert config.vision is not None
    one, nine = (tower_flops(config.vision, config.text, tiles * 27 * 27) for tiles in (1, 9))
    assert nine == 9 * one


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "gemm, tower"),
        ({"gemm": 1.5}, "gemm: a calibration has"),
        ({"layer_us": "17"}, "layer_us: "),
        ({"speed": 2}, "speed: "),
    ],
)
def test_a_calibration_that_cannot_be_is_refused_by_its_field(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.json"
    known = asdict(calibration_for(find_hardware("h200")))
    file.write_text(json.dumps({**known, **values} if values else {}))
    with pytest.raises(ConfigError, match=message):
        read_calibration(file)


def test_float32_runs_outside_tensor_cores() -> None:
    """Of which an H200 has 989 TFLOP/s beside 67."""
    fast, slow = (planned(options={"dtype": dtype}) for dtype in ("bfloat16", "float32"))
    assert slow.first_token.encode > 10 * fast.first_token.encode
    assert slow.first_token.prefill > 10 * fast.first_token.prefill
