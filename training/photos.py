"""Photographs in endless variation: windows of the pictures of a folder, turned, tinted, blurred, framed, compressed.

Also makes drawn pictures rough: what a camera or a compressor does to a drawing does not make it a photograph.
"""

from __future__ import annotations

import io
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageFilter

from training.canvas import noise_field
from training.textures import Size, clouds

SUFFIXES = (".jpg", ".jpeg", ".png")
_PLAIN = 9.0  # spread of a channel: a window with less could be an empty sheet of paper


def read_photos(folder: Path) -> tuple[Image.Image, ...]:
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
    if not files:
        raise FileNotFoundError(f"no pictures in {folder}; training/README.md says how to fill it")
    return tuple(Image.open(file).convert("RGB") for file in files)


def window(rng: Random, photo: Image.Image, size: Size) -> Image.Image:
    """A part of a photo, a twelfth of it or more, in which there is something to see."""
    for _ in range(4):
        image = _window(rng, photo, size)
        if np.asarray(image.resize((16, 16), Image.Resampling.NEAREST)).std(axis=(0, 1)).max() > _PLAIN:
            break
    return image


def _window(rng: Random, photo: Image.Image, size: Size) -> Image.Image:
    """About in the proportions of `size`."""
    aspect = size[0] / size[1] * rng.uniform(0.8, 1.25)
    wide = min(photo.width, photo.height * aspect)
    scale = rng.uniform(0.3, 1.0)
    wide, high = max(24.0, wide * scale), max(24.0, wide / aspect * scale)
    left, top = rng.uniform(0, max(0.0, photo.width - wide)), rng.uniform(0, max(0.0, photo.height - high))
    box = (left, top, min(left + wide, photo.width), min(top + high, photo.height))
    return photo.resize(size, Image.Resampling.BICUBIC, box=box, reducing_gap=2.0)


def varied(rng: Random, image: Image.Image) -> Image.Image:
    """Turned over, tinted, blurred; never so much that nothing can be seen."""
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if rng.random() < 0.1:
        image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    if rng.random() < 0.15:
        image = image.convert("L").convert("RGB")
    if rng.random() < 0.6:
        image = _tinted(rng, image)
    if rng.random() < 0.15:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.5, 3.0)))
    if rng.random() < 0.12:
        image = _framed(rng, image)
    return image


def rough(rng: Random, image: Image.Image, *, is_small: bool = False) -> Image.Image:
    """A drawing that went through the world: uneven light, a textured paper, noise, blur, compression.

    What is small in it stays legible where `is_small`.
    """
    kind = rng.random()
    if kind < 0.35:
        image = _lit(rng, image)
    elif kind < 0.5:
        image = _noisy(rng, image, rng.randint(6, 10) if is_small else rng.randint(8, 22))
    elif kind < 0.6 and not is_small:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.4, 0.9)))
    return compressed(rng, image, 70 if is_small else 30) if rng.random() < 0.6 else image


def compressed(rng: Random, image: Image.Image, lowest: int = 30) -> Image.Image:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=rng.randint(lowest, 92))
    return Image.open(stream).convert("RGB")


def _tinted(rng: Random, image: Image.Image) -> Image.Image:
    """Brightness, contrast and colour balance, by a table for each channel."""
    bright, contrast = rng.uniform(-35, 35), rng.uniform(0.6, 1.4)
    table: list[int] = []
    for _ in range(3):
        gain, shift = contrast * rng.uniform(0.85, 1.15), bright + rng.uniform(-12, 12)
        table += [min(255, max(0, int((value - 128) * gain + 128 + shift))) for value in range(256)]
    return image.point(table)


def _framed(rng: Random, image: Image.Image) -> Image.Image:
    """With a margin of one colour, as in a letter box or a page."""
    color = tuple(rng.choice(((0,) * 3, (255,) * 3, tuple(rng.randrange(256) for _ in range(3)))))
    across, down = rng.choice(((0.0, 0.14), (0.14, 0.0), (0.1, 0.1)))
    out = Image.new("RGB", image.size, color)
    left, top = int(image.width * across), int(image.height * down)
    out.paste(image.resize((image.width - 2 * left, image.height - 2 * top)), (left, top))
    return out


def _lit(rng: Random, image: Image.Image) -> Image.Image:
    """Brighter here, darker there: soft light, or the fine grain of paper."""
    hills, depth = (
        (rng.uniform(0.3, 1.0), rng.uniform(0.1, 0.3)) if rng.random() < 0.6 else (8.0, rng.uniform(0.05, 0.2))
    )
    light = 1 + depth * (clouds(rng, image.size, 0.5, hills) - 0.5)
    return Image.fromarray((np.asarray(image) * light[..., None]).clip(0, 255).astype(np.uint8))


def _noisy(rng: Random, image: Image.Image, strength: int) -> Image.Image:
    field = noise_field()
    top, left = rng.randrange(field.shape[0] - image.height), rng.randrange(field.shape[1] - image.width)
    noise = field[top : top + image.height, left : left + image.width] * np.int16(strength) >> 4
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))
