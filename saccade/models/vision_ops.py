"""What a device does for a vision tower beside its matrix products, in plain PyTorch. Knows no model family.

This is the CPU's way and the reference for others: `fused_vision` has the same methods for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from saccade.models.pixels import PatchLayout, Picture, PixelPolicy, as_tensor, normalise, patchify, resize
from saccade.models.resample import resample, weigh_axis
from saccade.models.vision import Angles, VisionBlock
from saccade.types import Grid, Size

RunBlock = Callable[[VisionBlock, Tensor], Tensor]
"""(block, x [T, hidden]) -> [T, hidden]. It may overwrite x."""


class VisionOps(Protocol):
    def resize(self, image: Picture, size: Size, resampling: int) -> Tensor:
        """uint8 [size.height, size.width, 3], where the picture is."""

    def cut(self, image: Tensor, grid: Grid, layout: PatchLayout, policy: PixelPolicy, dtype: torch.dtype) -> Tensor:
        """uint8 [H, W, 3] -> normalised patches [patches, patch_dim]"""

    def begin(self, lengths: Sequence[int], angles: Angles | None, device: torch.device) -> RunBlock:
        """A pass over packed pictures with these numbers of patches: what its blocks are run with."""


class TorchVision:
    def resize(self, image: Picture, size: Size, resampling: int) -> Tensor:
        """Pillow itself for a picture on the host; for a tensor its arithmetic, to the bit."""
        if isinstance(image, Tensor):
            return resample(image, size, resampling, weigh_axis)
        return as_tensor(resize(image, size, resampling))

    def cut(self, image: Tensor, grid: Grid, layout: PatchLayout, policy: PixelPolicy, dtype: torch.dtype) -> Tensor:
        return normalise(patchify(image, grid, *layout), policy, dtype)

    def begin(self, lengths: Sequence[int], angles: Angles | None, device: torch.device) -> RunBlock:
        return lambda block, x: block(x, lengths, angles)
