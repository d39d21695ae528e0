"""From pictures to patches: equal to Transformers' Pillow-based image processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks import checkpoints
from saccade.checkpoint.config import model_config
from saccade.models import load_model
from saccade.models.interface import VisionLanguageModel
from saccade.models.vision.preprocess import PixelPolicy, centre_crop, normalise, patchify, pixel_policy, resize
from saccade.types.media import Geometry, Grid, Size

pytestmark = pytest.mark.transformers

Pixels = npt.NDArray[np.uint8]


def picture(width: int, height: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def dummy(folder: Path, image_processor: dict[str, Any]) -> VisionLanguageModel:
    config = model_config(json.loads((folder / "config.json").read_text()))
    return load_model(
        None,
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format="dummy",
        image_processor=image_processor,
    )


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen2_vl(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.llava(tmp_path_factory.mktemp("llava"))


@pytest.mark.parametrize("size", [(97, 61), (56, 56), (30, 200), (333, 250)], ids=str)
def test_qwen2_vl_patches_equal_those_of_its_processor(qwen: Path, size: tuple[int, int]) -> None:
    image = picture(*size)
    theirs = Qwen2VLImageProcessorPil()(Image.fromarray(image), return_tensors="pt")
    grid = Grid(*theirs["image_grid_thw"][0].tolist())
    geometry = Geometry(Size(grid.w * 14, grid.h * 14), grid, grid.patches // 4, grid.patches // 4)
    ours = dummy(qwen, {}).prepare(image, geometry)
    torch.testing.assert_close(ours, theirs["pixel_values"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [(97, 61), (56, 56), (30, 200), (333, 251)], ids=str)
def test_llava_patches_equal_those_of_its_processor(llava: Path, size: tuple[int, int]) -> None:
    width, height = size
    processor = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    theirs = processor(Image.fromarray(picture(width, height)), return_tensors="pt")["pixel_values"][0]
    short = min(width, height)
    geometry = Geometry(Size(int(width * 56 / short), int(height * 56 / short)), Grid(1, 4, 4), 16, 16)
    ours = dummy(llava, {}).prepare(picture(width, height), geometry)
    cut = theirs.view(3, 4, 14, 4, 14).permute(1, 3, 0, 2, 4).reshape(16, -1)
    torch.testing.assert_close(ours, cut, atol=1e-5, rtol=0)


def test_mean_std_and_resampling_come_from_the_checkpoint(qwen: Path) -> None:
    given: dict[str, Any] = {
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.5, 0.6, 0.7],
        "resample": 2,
        "rescale_factor": 1 / 128,
    }
    image = picture(90, 70)
    theirs = Qwen2VLImageProcessorPil(**given)(Image.fromarray(image), return_tensors="pt")
    grid = Grid(*theirs["image_grid_thw"][0].tolist())
    ours = dummy(qwen, given).prepare(image, Geometry(Size(grid.w * 14, grid.h * 14), grid, 1, 1))
    torch.testing.assert_close(ours, theirs["pixel_values"], atol=1e-5, rtol=0)


def test_resizing_is_pillows_own() -> None:
    image = picture(61, 47)
    expected = np.asarray(Image.fromarray(image).resize((28, 56), Image.Resampling.BICUBIC))
    assert np.array_equal(resize(image, Size(28, 56)), expected)


def test_a_image_of_the_right_size_is_not_touched() -> None:
    image = picture(28, 56)
    assert resize(image, Size(28, 56)) is image


def test_a_crop_larger_than_the_image_is_black_around_it() -> None:
    cropped = centre_crop(torch.full((2, 9, 3), 7, dtype=torch.uint8), Size(5, 5))
    assert cropped[:, :, 0].tolist() == [[0] * 5, [0] * 5, [7] * 5, [7] * 5, [0] * 5]


def test_patches_of_one_token_follow_each_other() -> None:
    rows, columns = np.mgrid[0:4, 0:4]
    image = torch.from_numpy((rows * 4 + columns)[..., None].astype(np.uint8))
    order = patchify(image, Grid(1, 4, 4), 1, merge=2).flatten().tolist()
    assert order == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


def test_a_still_image_fills_every_frame_of_a_patch() -> None:
    patches = patchify(torch.from_numpy(picture(4, 4)), Grid(1, 2, 2), 2, frames=2).view(4, 3, 2, 4)
    assert torch.equal(patches[:, :, 0], patches[:, :, 1])


def test_normalising_uses_each_channels_own_mean() -> None:
    policy = PixelPolicy(scale=1.0, mean=(1.0, 2.0, 3.0), std=(1.0, 1.0, 2.0))
    patches = torch.full((1, 6), 5, dtype=torch.uint8)
    assert normalise(patches, policy, torch.float32).tolist() == [[4, 4, 3, 3, 1, 1]]


def test_a_processor_that_does_not_normalise_is_obeyed() -> None:
    policy = pixel_policy({"do_normalize": False, "do_rescale": False})
    assert normalise(torch.full((1, 3), 9, dtype=torch.uint8), policy, torch.float32).tolist() == [[9, 9, 9]]
