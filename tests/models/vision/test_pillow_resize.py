"""Pictures that are tensors: the same pixels and patches as Pillow and the host path give, to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from saccade.checkpoint.config import model_config
from saccade.errors import ConfigError
from saccade.models import load_model
from saccade.models.interface import VisionLanguageModel
from saccade.models.vision import pillow_resize as resample_module
from saccade.models.vision.pillow_resize import (
    BITS,
    FILTERS,
    is_height_first,
    resample,
    taps_of,
    weigh_axis,
    weights_of,
)
from saccade.models.vision.preprocess import pixel_policy
from saccade.types.media import Geometry, Grid, Size

CPU = torch.device("cpu")
SIDES = st.integers(1, 150)
BICUBIC = int(Image.Resampling.BICUBIC)


def picture(width: int, height: int, seed: int = 0, *, is_stark: bool = False) -> npt.NDArray[np.uint8]:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return np.where(noise > 127, 255, 0).astype(np.uint8) if is_stark else noise


def by_pillow(image: npt.NDArray[np.uint8], size: Size, resampling: int) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling(resampling)))


def load(folder: Path) -> VisionLanguageModel:
    config = model_config(json.loads((folder / "config.json").read_text()))
    return load_model(None, config, dtype=torch.float32, device=CPU, load_format="dummy")


@pytest.mark.parametrize("resampling", FILTERS, ids=FILTERS.get)
@settings(max_examples=40, deadline=None)
@given(SIDES, SIDES, SIDES, SIDES, st.booleans())
def test_resizing_a_tensor_gives_pillows_pixels(
    resampling: int, width: int, height: int, to_width: int, to_height: int, is_stark: bool
) -> None:
    image, size = picture(width, height, width + height, is_stark=is_stark), Size(to_width, to_height)
    found = resample(torch.from_numpy(image), size, resampling, weigh_axis)
    assert np.array_equal(found.numpy(), by_pillow(image, size, resampling))


@pytest.mark.parametrize("sizes", [((640, 360), (644, 364)), ((1000, 40), (56, 28)), ((97, 1203), (84, 1204))], ids=str)
def test_resizing_to_the_sizes_of_a_tower_gives_pillows_pixels(sizes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    image, size = picture(*sizes[0]), Size(*sizes[1])
    found = resample(torch.from_numpy(image), size, BICUBIC, weigh_axis)
    assert np.array_equal(found.numpy(), by_pillow(image, size, BICUBIC))


def test_a_tensor_of_the_right_size_is_not_touched() -> None:
    image = torch.from_numpy(picture(28, 56))
    assert resample(image, Size(28, 56), BICUBIC, weigh_axis) is image


def test_an_axis_that_keeps_its_length_is_not_computed() -> None:
    computed = []

    def remember(image: torch.Tensor, taps: resample_module.Taps) -> torch.Tensor:
        computed.append(image.shape)
        return weigh_axis(image, taps)

    resample(torch.from_numpy(picture(28, 56)), Size(28, 14), BICUBIC, remember)
    assert computed == [(1, 56, 84)]


def test_taps_of_a_pair_of_lengths_are_computed_once() -> None:
    assert taps_of(1000, 28, BICUBIC, CPU) is taps_of(1000, 28, BICUBIC, CPU)


def test_remembered_taps_are_bounded() -> None:
    assert taps_of.cache_info().maxsize == 256


@given(SIDES, SIDES)
def test_the_weights_of_a_pixel_sum_to_one(source: int, target: int) -> None:
    _, weights = weights_of(source, target, BICUBIC)
    assert np.abs(weights.sum(axis=0) - (1 << BITS)).max() <= len(weights)  # each is rounded by half a unit at most


def test_an_older_pillow_always_resizes_the_width_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resample_module, "_IS_WIDTH_ALWAYS_FIRST", True)
    assert not is_height_first(Size(10, 1000), Size(10, 10))


@pytest.mark.parametrize("size", [(97, 61), (56, 56), (30, 200), (333, 250)], ids=str)
def test_patches_of_a_tensor_equal_those_of_a_host_image(qwen2_vl_folder: Path, size: tuple[int, int]) -> None:
    image, model = picture(*size), load(qwen2_vl_folder)
    geometry = Geometry(Size(112, 84), Grid(1, 6, 8), 12, 12)
    assert torch.equal(model.prepare(torch.from_numpy(image), geometry), model.prepare(image, geometry))


@pytest.mark.parametrize("size", [(97, 61), (56, 56), (30, 200), (333, 251)], ids=str)
def test_cropped_patches_of_a_tensor_equal_those_of_a_host_image(llava_folder: Path, size: tuple[int, int]) -> None:
    image, model = picture(*size), load(llava_folder)
    short = min(size)
    geometry = Geometry(Size(size[0] * 56 // short, size[1] * 56 // short), Grid(1, 4, 4), 16, 16)
    assert torch.equal(model.prepare(torch.from_numpy(image), geometry), model.prepare(image, geometry))


def test_a_filter_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"resample=0; known are 1 \(lanczos\).*3 \(bicubic\)"):
        pixel_policy({"resample": 0})
