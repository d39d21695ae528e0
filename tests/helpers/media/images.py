"""Smooth random images, each from a seed."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def make_photo(width: int = 112, height: int = 84, seed: int = 0) -> Image.Image:
    """A smooth random picture, different for each seed."""
    small = np.random.default_rng(seed).integers(0, 255, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def jpeg_of_scans(width: int, height: int, extra: int) -> bytes:
    """A progressive JPEG whose last scan comes so many times more: few bytes, each scan is decoded."""
    stream = io.BytesIO()
    make_photo(width, height).save(stream, "JPEG", progressive=True)
    data = stream.getvalue()
    last = data.rfind(b"\xff\xda")
    return data[:last] + data[last:-2] * (extra + 1) + data[-2:]


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()
