"""Image preprocessing: resize, crop, normalise and cut into patches (Hugging Face: image processor)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from saccade.checkpoint.settings import setting
from saccade.errors import ConfigError
from saccade.models.vision.pillow_resize import FILTERS
from saccade.types.media import Grid, Size, Tiling

Pixels = npt.NDArray[np.uint8]  # [height, width, 3]


class Undecoded(Protocol):
    """An image on the CPU that is decoded while it is resized."""

    shape: tuple[int, int, int]  # of its pixels

    def resized(self, size: Size, resampling: int) -> Pixels:
        """[size.height, size.width, 3]"""


ImagePixels = Pixels | Tensor | Undecoded
"""8-bit RGB [height, width, 3] on the CPU, or a tensor on the device. A frame group is [frames, ...]."""

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class PixelPolicy:
    """Pixel settings of preprocessor_config.json."""

    resample: int = Image.Resampling.BICUBIC
    scale: float = 1 / 255
    mean: tuple[float, ...] = _CLIP_MEAN  # per channel, after scaling
    std: tuple[float, ...] = _CLIP_STD


def pixel_policy(settings: Mapping[str, Any]) -> PixelPolicy:
    resampling = settings.get("resample", Image.Resampling.BICUBIC)
    if resampling not in FILTERS:
        names = ", ".join(f"{number} ({name})" for number, name in sorted(FILTERS.items()))
        raise ConfigError(f"preprocessor_config.json asks for resample={resampling}; known are {names}")
    mean = tuple(setting(settings, "image_mean", _CLIP_MEAN))
    std = tuple(setting(settings, "image_std", _CLIP_STD))
    if not settings.get("do_normalize", True):
        mean = (0.0,) * 3
        std = (1.0,) * 3
    scale = setting(settings, "rescale_factor", 1 / 255)
    return PixelPolicy(resampling, scale if settings.get("do_rescale", True) else 1.0, mean, std)


class PatchLayout(NamedTuple):
    """The patch format of a tower."""

    patch: int  # side, in pixels
    merge: int = 1  # patches along each side of a token
    frames: int = 1  # per patch; an image is repeated


def resize(image: Pixels | Undecoded, size: Size, resampling: int = Image.Resampling.BICUBIC) -> Pixels:
    """Pillow's resampling on uint8, with whose rounding models are trained."""
    if not isinstance(image, np.ndarray):
        return image.resized(size, resampling)
    if image.shape[:2] == (size.height, size.width):
        return image
    return np.asarray(Image.fromarray(image).resize(size, resample=Image.Resampling(resampling)))


def as_tensor(image: Pixels) -> Tensor:
    # PyTorch shares the array's memory and warns if it is read-only.
    return torch.from_numpy(np.require(image, requirements=["C_CONTIGUOUS", "WRITEABLE"]))


def centre_crop(image: Tensor, size: Size) -> Tensor:
    """The centre of an image [H, W, C], padded with black if it is smaller than `size`."""
    height, width = image.shape[:2]
    left = (width - size.width) // 2
    top = (height - size.height) // 2
    right = width - left - size.width
    bottom = height - top - size.height
    if min(left, top, right, bottom) < 0:
        image = F.pad(image, (0, 0, *(max(-side, 0) for side in (left, right, top, bottom))))
    return image[max(top, 0) :, max(left, 0) :][: size.height, : size.width]


def cut_tiles(canvas: Tensor, tiling: Tiling, side: int) -> Tensor:
    """uint8 [H, W, 3] -> [rows * columns, side, side, 3]"""
    return canvas.view(tiling.rows, side, tiling.columns, side, 3).transpose(1, 2).reshape(-1, side, side, 3)


def patchify(image: Tensor, grid: Grid, patch: int, merge: int = 1, frames: int = 1) -> Tensor:
    """Cut [H, W, C] into [h * w, C * frames * patch * patch], each patch flattened channel first.

    Patches that will merge into one token are adjacent (merge 2, indices in the sequence):

        0 1 | 4 5
        2 3 | 6 7
        ----+----
        8 9 | ...

    An image fills all `frames` of a patch with the same pixels.
    """
    channels = image.shape[2]
    cells = image[: grid.h * patch, : grid.w * patch].reshape(
        grid.h // merge, merge, patch, grid.w // merge, merge, patch, channels
    )
    ordered = cells.permute(0, 3, 1, 4, 6, 2, 5)  # [h / merge, w / merge, merge, merge, C, patch, patch]
    still = ordered.unsqueeze(5).expand(-1, -1, -1, -1, -1, frames, -1, -1)
    return still.reshape(grid.h * grid.w, channels * frames * patch * patch)


def normalise(patches: Tensor, policy: PixelPolicy, dtype: torch.dtype) -> Tensor:
    """uint8 patches [n, C * rest] -> (value * scale - mean) / std of their channel, computed in float32."""
    mean, std = (torch.tensor(v, device=patches.device)[:, None] for v in (policy.mean, policy.std))  # [C, 1]
    values = patches.view(len(patches), len(mean), -1).float()  # [n, C, rest]
    return values.mul_(policy.scale / std).sub_(mean / std).flatten(1).to(dtype)
