"""Pillow's resampling of 8-bit images, on tensors and bit for bit.

It is separable. An output pixel is a weighted sum of a few neighbours; weights are integers of 22 bits, and
each axis rounds to 8 bits. All of it is integer arithmetic, so every device gives Pillow's pixels.

    source   0 1 2 3 4 5 6 7 8 9        start 3, five taps
    target             ^                weights[:, 2] = (-a, b, c, b, -a), sum 1 << 22
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import PIL
import torch
from PIL.Image import Resampling
from torch import Tensor

from saccade.types.media import Size

Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
WeighAxis = Callable[[Tensor, "Taps"], Tensor]
"""uint8 [outer, source, inner], contiguous -> [outer, target, inner]"""

BITS = 22  # of a weight: with 8 of the pixel, the sign and one for the sum they fit 32 bits
# Up to version 12 Pillow resizes the width first; later ones the height, if that shrinks by far more pixels.
_IS_WIDTH_ALWAYS_FIRST = int(PIL.__version__.split(".")[0]) < 13
_CACHED_AXES = 256  # pairs of sizes, of up to a few hundred kilobytes


class Taps(NamedTuple):
    """How one axis is resampled."""

    starts: Tensor  # int32 [target]: first source pixel of each sum
    weights: Tensor  # int32 [taps, target]; zero where a sum has fewer


class _Filter(NamedTuple):
    support: float  # half its width, in pixels
    weigh: Callable[[Doubles], Doubles]  # of distances from the centre


def resample(image: Tensor, size: Size, resampling: int, weigh: WeighAxis) -> Tensor:
    """uint8 [H, W, C] -> [size.height, size.width, C]. An axis that keeps its length is skipped."""
    if is_height_first(Size(image.shape[1], image.shape[0]), size):
        high = _resample_height(image, size.height, resampling, weigh)
        return _resample_width(high, size.width, resampling, weigh)
    wide = _resample_width(image, size.width, resampling, weigh)
    return _resample_height(wide, size.height, resampling, weigh)


def is_height_first(source: Size, target: Size) -> bool:
    """The order matters, because each axis rounds."""
    rows = source.height - target.height
    columns = source.width - target.width
    return rows > 0 and rows > 2 * columns and not _IS_WIDTH_ALWAYS_FIRST


def _resample_width(image: Tensor, width: int, resampling: int, weigh: WeighAxis) -> Tensor:
    source = image.shape[1]
    return image if source == width else weigh(image, taps_of(source, width, resampling, image.device))


def _resample_height(image: Tensor, height: int, resampling: int, weigh: WeighAxis) -> Tensor:
    source, width, channels = image.shape
    if source == height:
        return image
    rows = image.view(1, source, width * channels)
    return weigh(rows, taps_of(source, height, resampling, image.device)).view(height, width, channels)


def weigh_axis(image: Tensor, taps: Taps) -> Tensor:
    """uint8 [outer, source, inner] -> [outer, target, inner], one tap at a time."""
    outer, source, inner = image.shape
    shape = (outer, len(taps.starts), inner)
    total = torch.full(shape, 1 << (BITS - 1), dtype=torch.int32, device=image.device)
    for tap, weights in enumerate(taps.weights):  # [target]
        index = (taps.starts + tap).clamp_(max=source - 1)
        total += image.index_select(1, index).int() * weights[:, None]
    return total.bitwise_right_shift_(BITS).clamp_(0, 255).to(torch.uint8)


@lru_cache(maxsize=_CACHED_AXES)
def taps_of(source: int, target: int, resampling: int, device: torch.device) -> Taps:
    starts, weights = weights_of(source, target, resampling)
    # A synchronous copy, because cached taps may be used on another stream.
    return Taps(torch.from_numpy(starts).to(device), torch.from_numpy(weights).to(device))


def weights_of(source: int, target: int, resampling: int) -> tuple[Ints, Ints]:
    """`Taps` on the CPU. Shrinking widens the filter, so that every source pixel contributes."""
    kind = _FILTERS[Resampling(resampling)]
    scale = source / target
    widened = max(scale, 1.0)
    reach = kind.support * widened
    centres = (np.arange(target) + 0.5) * scale
    starts = np.maximum((centres - reach + 0.5).astype(np.int32), 0)
    ends = np.minimum((centres + reach + 0.5).astype(np.int32), source)
    indices = starts[:, None] + np.arange(math.ceil(reach) * 2 + 1)  # [target, taps]
    raw = kind.weigh((indices - centres[:, None] + 0.5) * (1.0 / widened)) * (indices < ends[:, None])
    total = np.cumsum(raw, axis=1)[:, -1:]  # in order, as Pillow does
    exact = raw / np.where(total == 0, 1.0, total) * (1 << BITS)
    rounded = np.trunc(exact + np.where(raw < 0, -0.5, 0.5)).astype(np.int32)
    taps = int((ends - starts).max())
    return starts, np.ascontiguousarray(rounded[:, :taps].T)


def _box(x: Doubles) -> Doubles:
    return ((x > -0.5) & (x <= 0.5)).astype(np.float64)


def _triangle(x: Doubles) -> Doubles:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _hamming(x: Doubles) -> Doubles:
    base = float(np.float32(0.54))  # single precision in Pillow, too
    swing = float(np.float32(0.46))
    return np.where(np.abs(x) < 1, np.sinc(x) * (base + swing * np.cos(np.pi * x)), 0.0)


def _cubic(x: Doubles) -> Doubles:
    """Keys' cubic with a = -1/2."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _lanczos(x: Doubles) -> Doubles:
    return np.where((x >= -3) & (x < 3), np.sinc(x) * np.sinc(x / 3), 0.0)


_FILTERS: Mapping[Resampling, _Filter] = {
    Resampling.BOX: _Filter(0.5, _box),
    Resampling.BILINEAR: _Filter(1.0, _triangle),
    Resampling.HAMMING: _Filter(1.0, _hamming),
    Resampling.BICUBIC: _Filter(2.0, _cubic),
    Resampling.LANCZOS: _Filter(3.0, _lanczos),
}
FILTERS = {int(kind): kind.name.lower() for kind in _FILTERS}
