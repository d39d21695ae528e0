"""What the bridge makes of a picture, and of a size: equal to the whole processor's of Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from saccade.checkpoint.hf_image_part import ImagePart
from saccade.checkpoint.hf_processor import Leaves, Placeholder, load_processor, placeholder, processed
from saccade.checkpoint.hf_shapes import SizeRuns
from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.images import ImageInputs
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.families import fallback
from saccade.types.media import Size
from tests.helpers.families.zoo import ZOO, second_half

pytestmark = pytest.mark.transformers

CHEAP = ("glm4v", "idefics3", "lfm2_vl", "step3p7")  # grids, tiles, masks, steps of torchvision
PATCH_DIM = 96


class Family:
    def __init__(self, folder: Path) -> None:
        config = open_checkpoint(str(folder)).config
        self.processor = load_processor(folder, config.model_type)
        self.place: Placeholder = placeholder(self.processor, config)

    def inputs(self) -> ImageInputs:
        return ImageInputs(self.processor, self.place, PATCH_DIM, torch.bfloat16, torch.device("cpu"))

    def whole(self, image: Image.Image) -> Leaves:
        return Leaves.of(processed(self.processor, self.place.written, image))


@pytest.fixture(scope="module", params=[*CHEAP, "molmo2"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    with second_half.libraries(request.param):
        made = Family(ZOO[request.param].build(tmp_path_factory.mktemp("zoo")))
        made.processor.name = request.param
        yield made


def noise(width: int, height: int) -> Any:
    return np.random.default_rng(width * height).integers(0, 256, (height, width, 3), np.uint8)


def rows_of(leaves: Leaves) -> torch.Tensor:
    flat = torch.cat([tensor.reshape(-1) for tensor in leaves.content]).to(torch.bfloat16)
    return torch.nn.functional.pad(flat, (0, -len(flat) % PATCH_DIM)).view(-1, PATCH_DIM)


def test_sizes_and_rows_are_those_of_the_whole_processor(family: Family) -> None:
    runs, images = SizeRuns(family.processor, family.place.written), family.inputs()
    assert runs.is_cheap == (family.processor.name in CHEAP)
    assert isinstance(images._made, ImagePart)

    @settings(max_examples=8, deadline=None)
    @given(st.integers(3, 500), st.integers(30, 500), st.booleans())
    def check(width: int, height: int, turned: bool) -> None:
        size = (height, width) if turned else (width, height)
        pixels = noise(*size)
        whole = family.whole(Image.fromarray(pixels))
        assert whole.is_like(Leaves.of(runs(size)))
        rows = images.rows(pixels)
        assert torch.equal(rows, rows_of(whole))
        again = Leaves.of(images.inputs(rows, Size(*size)))
        assert torch.equal(rows_of(again), rows)

    check()


def test_threads_prepare_at_once(family: Family) -> None:
    images, pictures = family.inputs(), [noise(40 + 30 * i, 120) for i in range(6)]
    alone = [rows_of(family.whole(Image.fromarray(picture))) for picture in pictures]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(images.rows, pictures * 3))
    assert all(map(torch.equal, together, alone * 3))


@pytest.mark.parametrize("family", ["phi4_multimodal"], indirect=True)
def test_a_blank_image_has_the_masks_of_its_size(family: Family) -> None:
    images = family.inputs()
    blank = Leaves.of(images.blank(rows=10_000))
    sizes = [Size(512, 384), Size(1280, 720), Size(64, 64)]
    wholes = [rows_of(family.whole(Image.new("RGB", size))) for size in sizes]
    assert any(torch.equal(rows_of(blank), whole) for whole in wholes)


@pytest.mark.parametrize("family", ["glm4v"], indirect=True)
def test_a_processor_whose_sizes_follow_from_pixels_is_refused(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(family.processor.image_processor)
    own = kind._preprocess

    def counts_light(self: Any, images: list[Any], *args: Any, **named: Any) -> Any:
        made = own(self, images, *args, **named)
        made["light"] = torch.tensor([int((images[0] > 127).sum())])
        return made

    monkeypatch.setattr(kind, "_preprocess", counts_light)
    with pytest.raises(Unfit, match="makes other sizes or tokens than of a blank one of its 300x211 pixels"):
        family.inputs()


def test_sizes_that_are_kept_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_KEPT_VALUES", 100)
    counted: list[Size] = []

    def count(size: Size) -> fallback.Counted:
        counted.append(size)
        return fallback.Counted(np.zeros(30, np.int32), np.zeros(0, np.int8), 1, {"grid": torch.zeros(1, 3)})

    counts, sizes = fallback.Counts(count), [Size(10, height) for height in (1, 2, 3, 4)]
    for size in (*sizes, *sizes[2:], sizes[0]):
        counts(size)
    assert counted == [*sizes, sizes[0]]
