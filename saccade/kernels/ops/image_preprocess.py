"""Image preprocessing: resampling and patches, each one pass over memory. Knows pixels, no model.

weigh_axis: grid (outer * blocks,)                       cut_patches: grid (patches,)

    image [outer, source, inner]                         image [H, W, 3]        program n: the patch that comes
      columns of an image: outer H, inner 3                  +--+--+            n-th in the tower's order
      rows of an image:    outer 1, inner W * 3              |0 |1 |..          reads patch rows of 3 * patch bytes
    program: BLOCK elements of one [target, inner] plane     +--+--+            writes [3, frames, patch, patch]
      element i -> target i // inner, taps from its start    |2 |3 |..
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.varlen_tiles import power_of_two

_BLOCK = 1024


class Cut(NamedTuple):
    """How patches lie in an image and in the tower's input."""

    rows: int  # patches
    columns: int
    patch: int  # side, in pixels
    merge: int  # patches along each side of the squares whose patches follow each other
    frames: int  # copies of the pixels in a patch


def weigh_axis(image: Tensor, starts: Tensor, weights: Tensor, bits: int) -> Tensor:
    """uint8 [outer, source, inner] -> [outer, target, inner]: sums of `weights` int32 [taps, target] from `starts` on.

    Weights are fixed-point with `bits` fractional bits; sums are rounded and clamped to 8 bits.
    """
    assert image.is_contiguous() and weights.is_contiguous()
    outer, source, inner = image.shape
    taps, target = weights.shape
    out = torch.empty((outer, target, inner), dtype=torch.uint8, device=image.device)
    blocks = triton.cdiv(target * inner, _BLOCK)
    _weigh_kernel[(outer * blocks,)](
        image, starts, weights, out, source, target, inner, taps, blocks, BITS=bits, BLOCK=_BLOCK, num_warps=4
    )
    return out


def cut_patches(
    image: Tensor,  # uint8 [H, W, 3], last two dimensions dense; H and W at least what the cut covers
    cut: Cut,
    gain: Sequence[float],  # per channel: value * gain - shift
    shift: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:
    """[patches, 3 * frames * patch * patch], each patch flattened channel first."""
    assert image.stride()[1:] == (3, 1), f"an image of strides {image.stride()} is not dense"
    area = cut.patch**2
    patches = cut.rows * cut.columns
    out = torch.empty((patches, 3 * cut.frames * area), dtype=dtype, device=image.device)
    _cut_kernel[(patches,)](
        image, out, image.stride(0), cut.columns, *gain, *shift,
        PATCH=cut.patch, MERGE=cut.merge, FRAMES=cut.frames, AREA=area, VALUES=power_of_two(3 * area), num_warps=4,
    )  # fmt: skip
    return out


# Sizes differ from image to image: none of them may cause another compilation.
@triton.jit(do_not_specialize=["source", "target", "inner", "taps", "blocks"])
def _weigh_kernel(
    image: tl.tensor, starts: tl.tensor, weights: tl.tensor, out: tl.tensor,
    source: tl.tensor, target: tl.tensor, inner: tl.tensor, taps: tl.tensor, blocks: tl.tensor,
    BITS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    plane = (tl.program_id(0) // blocks).to(tl.int64)
    index = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = index < target * inner
    to = index // inner
    offset = index % inner
    start = tl.load(starts + to, mask=inside, other=0)
    places = image + plane * source * inner + offset
    total = tl.full([BLOCK], 1 << (BITS - 1), tl.int32)  # one half: the shift below then rounds
    for tap in range(taps):
        weight = tl.load(weights + tap * target + to, mask=inside, other=0)
        pixel = tl.load(places + tl.minimum(start + tap, source - 1) * inner, mask=inside, other=0)
        total += pixel.to(tl.int32) * weight
    value = tl.minimum(tl.maximum(total >> BITS, 0), 255)
    tl.store(out + plane * target * inner + index, value.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["image_row", "columns"])
def _cut_kernel(
    image: tl.tensor, out: tl.tensor, image_row: tl.tensor, columns: tl.tensor,
    gain0: tl.tensor, gain1: tl.tensor, gain2: tl.tensor, shift0: tl.tensor, shift1: tl.tensor, shift2: tl.tensor,
    PATCH: tl.constexpr, MERGE: tl.constexpr, FRAMES: tl.constexpr, AREA: tl.constexpr, VALUES: tl.constexpr,
) -> None:  # fmt: skip
    patch = tl.program_id(0)
    square, within = patch // (MERGE * MERGE), patch % (MERGE * MERGE)
    across = columns // MERGE
    row = square // across * MERGE + within // MERGE
    column = square % across * MERGE + within % MERGE
    value = tl.arange(0, VALUES)
    inside = value < 3 * AREA
    channel, pixel = value // AREA, value % AREA
    offsets = (row * PATCH + pixel // PATCH).to(tl.int64) * image_row + (column * PATCH + pixel % PATCH) * 3 + channel
    read = tl.load(image + offsets, mask=inside, other=0).to(tl.float32)
    gain = tl.where(channel == 0, gain0, tl.where(channel == 1, gain1, gain2))
    shift = tl.where(channel == 0, shift0, tl.where(channel == 1, shift1, shift2))
    normal = (read * gain - shift).to(out.dtype.element_ty)
    result = out + patch.to(tl.int64) * (3 * FRAMES * AREA) + channel * (FRAMES * AREA) + pixel
    for frame in tl.static_range(FRAMES):
        tl.store(result + frame * AREA, normal, mask=inside)
