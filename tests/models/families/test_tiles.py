"""Tiles of LLaVA-NeXT and LLaVA-OneVision: costs, sizes and pixels are those of Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import LlavaNextProcessor, PreTrainedTokenizerFast
from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from saccade.types.media import Grid, Size
from tests.helpers.engine.reference import Reference
from tests.helpers.families import family_llava_onevision
from tests.helpers.families.conformance import NEXT_PINPOINTS, ONEVISION_PINPOINTS, ROWS
from tests.helpers.families.families import FAMILIES
from tests.helpers.families.family_checks import Subject, as_patches
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

sides = st.one_of(st.integers(1, 64), st.integers(1, 3000), st.integers(1, 60_000))


class Tiled(NamedTuple):
    subject: Subject
    reference: Reference
    rules: Any  # of the checkpoints on the hub
    their_rules: Any
    pinpoints: list[list[int]]  # of the hub, too: heights and widths
    tile: int  # its side in pixels
    not_spelled: int  # tokens of a tile that are counted and dropped


def next_rules(tokenizer: Any) -> LlavaNextProcessor:
    images = LlavaNextImageProcessorPil(image_grid_pinpoints=NEXT_PINPOINTS)
    how = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaNextProcessor(images, tokenizer, **how)


def onevision_rules(tokenizer: Any) -> Any:
    how = {"num_image_tokens": 729, "vision_aspect_ratio": "anyres_max_9"}
    return family_llava_onevision.hf_processor(tokenizer, **how)


@pytest.fixture(scope="module", params=["llava_next", "llava_onevision"])
def tiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiled:
    folder: Path = FAMILIES[request.param].build(tmp_path_factory.mktemp(request.param))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    rows = {
        "llava_next": (next_rules, NEXT_PINPOINTS, 336, 1),
        "llava_onevision": (onevision_rules, ONEVISION_PINPOINTS, 384, 0),
    }
    their_rules, *numbers = rows[request.param]
    subject, reference = Subject(folder), FAMILIES[request.param].reference(folder)
    return Tiled(subject, reference, ROWS[request.param].rules, their_rules(tokenizer), *numbers)


@settings(max_examples=400, deadline=None)
@given(width=sides, height=sides)
def test_any_image_has_the_tokens_and_the_size_of_transformers(tiled: Tiled, width: int, height: int) -> None:
    assume(max(width, height) / min(width, height) <= 200)
    rules, tile = tiled.rules, tiled.tile
    geometry = rules.geometry(Size(width, height), *rules.policy(None, None))
    expected = tiled.their_rules._get_number_of_features(height, width, tile, tile) - tiled.not_spelled
    assert geometry.tokens == geometry.slots == expected
    target = select_best_resolution((height, width), tiled.pinpoints)
    stand_in = np.broadcast_to(np.uint8(0), (3, height, width))  # its shape is all that is looked at
    fitted = get_patch_output_size(stand_in, target, "channels_first")
    assert (geometry.resized.height, geometry.resized.width) == fitted
    assert geometry.grid == Grid(1 + target[0] * target[1] // tile**2, tile // 14, tile // 14)


@settings(max_examples=40, deadline=None)
@given(width=st.integers(1, 300), height=st.integers(1, 300))
def test_the_tiles_are_those_of_the_whole_processor(tiled: Tiled, width: int, height: int) -> None:
    assume(max(width, height) / min(width, height) <= 200)
    photo = make_photo(width, height)
    made, spelled = tiled.reference.read([photo])
    geometry = tiled.subject.geometry(photo)
    assert made["pixel_values"].shape[1] == geometry.grid.t
    assert len(spelled[0]) == geometry.tokens * len("<image>")


PHOTOS = {photo.size: photo for name in ("llava_next", "llava_onevision") for photo in ROWS[name].photos}


@pytest.mark.parametrize("photo", PHOTOS.values(), ids=lambda photo: f"{photo.width}x{photo.height}")
def test_prepared_tiles_equal_those_of_transformers(tiled: Tiled, photo: Image.Image) -> None:
    pixels = tiled.reference.read([photo])[0]["pixel_values"][0]  # [tiles, 3, side, side]
    torch.testing.assert_close(tiled.subject.prepare(photo), as_patches(pixels, 14), rtol=0, atol=2e-6)
