"""What stands in for libraries that families of the zoo need and that are not installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from tests.helpers.families.zoo.second_half import ENTRIES, TORCHVISION, libraries
from tests.helpers.families.zoo.stand_in_torchvision import InterpolationMode, normalize, pad, pil_to_tensor, resize
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers


@pytest.mark.parametrize("mode", [InterpolationMode.BILINEAR, InterpolationMode.BICUBIC], ids=str)
def test_pictures_are_resized_as_pillow_does(mode: InterpolationMode) -> None:
    photo = make_photo(120, 90)
    ours = resize(pil_to_tensor(photo), (40, 70), mode)
    theirs = pil_to_tensor(photo.resize((70, 40), getattr(Image.Resampling, mode.name)))
    assert ours.dtype == torch.uint8
    assert (ours.int() - theirs.int()).abs().max() <= 2


def test_a_border_has_the_colour_that_was_asked_for() -> None:
    padded = pad(torch.zeros(3, 2, 2), (1, 0, 2, 1), fill=[7, 8, 9])
    assert padded.shape == (3, 3, 5)
    assert padded[:, -1, 0].tolist() == [7, 8, 9]
    assert padded[:, 0, 1:3].sum() == 0


def test_each_channel_has_its_own_mean_and_deviation() -> None:
    found = normalize(torch.ones(3, 1, 1), [0.0, 1.0, 0.5], [1.0, 1.0, 0.25])
    assert found.flatten().tolist() == [1.0, 0.0, 2.0]


def _loads(folder: Path) -> bool:
    try:
        AutoImageProcessor.from_pretrained(folder)
    except ValueError:
        return False
    return True


def test_a_processor_that_needs_torchvision_runs_with_them_and_afterwards_all_is_as_before(tmp_path: Path) -> None:
    folder = ENTRIES["step3p7"].build(tmp_path)
    assert "step3p7" in TORCHVISION
    before = _loads(folder)
    with libraries("step3p7"):
        made = AutoImageProcessor.from_pretrained(folder)(make_photo(100, 75), return_tensors="np")
    assert made["pixel_values"].shape == (1, 3, 224, 224)
    assert np.isfinite(made["pixel_values"]).all()
    assert _loads(folder) == before == (find_spec("torchvision") is not None)
