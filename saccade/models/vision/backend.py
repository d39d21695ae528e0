"""The ops of a vision tower that differ by device, here in PyTorch: the CPU's and the reference.

`cuda.vision` has the same methods for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.models.vision import preprocess
from saccade.models.vision.blocks import PatchPositions, RotaryCosSin, VisionBlock, angles_of
from saccade.models.vision.pillow_resize import resample, weigh_axis
from saccade.models.vision.preprocess import ImagePixels, PatchLayout, PixelPolicy
from saccade.types.media import Grid, Size

Blocks = Sequence[VisionBlock]
Lengths = Sequence[int]  # patches of each packed image
RunBlocks = Callable[[Blocks, Tensor], tuple[Tensor, int]]
"""(blocks, x [T, hidden]) -> [T, hidden] after the first blocks, and their number. May overwrite x."""


class VisionOps(Protocol):
    def resize(self, image: ImagePixels, size: Size, resampling: int) -> Tensor:
        """uint8 [size.height, size.width, 3], on the image's device."""

    def cut(
        self, image: Tensor, grid: Grid, layout: PatchLayout, policy: PixelPolicy, dtype: torch.dtype
    ) -> Tensor:
        """uint8 [H, W, 3] -> normalised patches [patches, patch_dim]"""

    def begin(self, lengths: Lengths, positions: PatchPositions | None, device: torch.device) -> RunBlocks:
        """Start a pass over packed images of these lengths; returns the function that runs blocks."""

    def begin_rotated(self, lengths: Lengths, angles: RotaryCosSin | None, device: torch.device) -> RunBlocks:
        """The same with RoPE that was computed elsewhere."""


class TorchVision:
    def resize(self, image: ImagePixels, size: Size, resampling: int) -> Tensor:
        """Pillow for an image on the CPU; for a tensor the same arithmetic, bit for bit."""
        if isinstance(image, Tensor):
            return resample(image, size, resampling, weigh_axis)
        return preprocess.as_tensor(preprocess.resize(image, size, resampling))

    def cut(
        self, image: Tensor, grid: Grid, layout: PatchLayout, policy: PixelPolicy, dtype: torch.dtype
    ) -> Tensor:
        return preprocess.normalise(preprocess.patchify(image, grid, *layout), policy, dtype)

    def begin(self, lengths: Lengths, positions: PatchPositions | None, device: torch.device) -> RunBlocks:
        return self.begin_rotated(lengths, angles_of(positions) if positions else None, device)

    def begin_rotated(self, lengths: Lengths, angles: RotaryCosSin | None, device: torch.device) -> RunBlocks:
        def run(blocks: Blocks, x: Tensor) -> tuple[Tensor, int]:
            rows = blocks[0].qkv.padding(len(x))
            if not rows:
                return blocks[0](x, lengths, angles), 1
            # Once a block, not once a GEMM: the padding is one more image.
            padded = None
            if angles is not None:
                padded = RotaryCosSin(*(_pad(part, rows) for part in angles))
            return blocks[0](_pad(x, rows), [*lengths, rows], padded)[: len(x)], 1

        return run


def _pad(rows: Tensor, count: int) -> Tensor:
    return F.pad(rows, (0, 0, 0, count))


def run_blocks(run: RunBlocks, blocks: Blocks, x: Tensor) -> Generator[int, None, Tensor]:
    """Run all blocks; yields the number of layers that were run after each call."""
    first = 0
    while first < len(blocks):
        x, count = run(blocks[first:], x)
        first += count
        yield count
    return x


def run_blocks_keeping(
    run: RunBlocks, blocks: Blocks, x: Tensor, depths: Sequence[int]
) -> Generator[int, None, list[Tensor]]:
    """The same up to the deepest of `depths`; returns x after so many blocks, for each depth."""
    outputs: dict[int, Tensor] = {}
    first = 0
    for depth in sorted(set(depths)):
        x = yield from run_blocks(run, blocks[first:depth], x)
        outputs[depth] = x.clone() if depth < max(depths) else x  # the next block may overwrite it
        first = depth
    return [outputs[depth] for depth in depths]
