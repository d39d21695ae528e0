"""Camera-like noise that is added when a picture is read, so that a question set can hold the clean one.

Noise does not compress: stored with it, the built-in set would be 35 MB. One field of noise, stored once, serves all
pictures; each names the window it takes of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

_MIDDLE = 128  # a stored field is an ordinary picture, whose values cannot be negative

Field = npt.NDArray[np.int16]


class Grain(NamedTuple):
    """A window of a field, and how strongly it shows."""

    left: int
    top: int
    strength: int  # sixteenths


def add_grain(image: Image.Image, field: Field, grain: Grain) -> Image.Image:
    rows, columns = slice(grain.top, grain.top + image.height), slice(grain.left, grain.left + image.width)
    noise = field[rows, columns] * np.int16(grain.strength) >> 4  # [height, width, 3]
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def field_to_image(field: Field) -> Image.Image:
    assert np.abs(field).max() < _MIDDLE, f"noise of {np.abs(field).max()} does not fit into a byte"
    return Image.fromarray((field + _MIDDLE).astype(np.uint8))


def field_from_image(image: Image.Image) -> Field:
    return np.asarray(image.convert("RGB"), np.int16) - np.int16(_MIDDLE)
