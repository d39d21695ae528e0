"""Camera-like noise, added when an image is read.

Noise does not compress: with it the built-in set would have 35 MB. One stored field of noise serves all
images; each names its window of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

_MIDDLE = 128  # offset of a stored field, an image without negative values

Field = npt.NDArray[np.int16]


class Grain(NamedTuple):
    """A window of a field, and its strength."""

    left: int
    top: int
    strength: int  # sixteenths


def add_grain(image: Image.Image, field: Field, grain: Grain) -> Image.Image:
    window = field[grain.top : grain.top + image.height, grain.left : grain.left + image.width]
    noise = window * np.int16(grain.strength) >> 4  # [height, width, 3]
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def field_to_image(field: Field) -> Image.Image:
    assert np.abs(field).max() < _MIDDLE, f"noise of {np.abs(field).max()} does not fit into a byte"
    return Image.fromarray((field + _MIDDLE).astype(np.uint8))


def field_from_image(image: Image.Image) -> Field:
    return np.asarray(image.convert("RGB"), np.int16) - np.int16(_MIDDLE)
