"""Quantised weights back to float32: the reference for every layout in which they are published.

Each function takes the stored tensors of one weight. Sizes that do not agree raise ValueError. Whole numbers
in groups come as `Grouped`: they may stay packed, in a layout of our own (`int4_weights`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in its word of each of eight columns
_E8M0_BIAS = 127


def scaled(weight: Tensor, scale: Tensor, block: tuple[int, int], zero_point: Tensor | None = None) -> Tensor:
    """One scale for all, for each row, or for each block of the last two dimensions. FP8 or int8."""
    values = weight.float()
    if zero_point is not None:
        values = values - _for_each(weight.shape, zero_point.float(), block)
    return values * _for_each(weight.shape, scale.float(), block)


def _for_each(shape: torch.Size, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Scales of a weight of this shape, as a tensor that multiplies it."""
    if scale.dim() == 1 and len(scale) == shape[0] and len(shape) > 1:
        scale = scale.view(-1, *[1] * (len(shape) - 1))
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() != len(shape):
        raise ValueError(f"its scale has the shape {list(scale.shape)}, the weight {list(shape)}")
    for dim, size in enumerate(shape):
        blocks = block[dim - len(shape)] if dim >= len(shape) - 2 else 1
        scale = _spread(scale, dim, size, blocks)
    return scale


def _spread(scale: Tensor, dim: int, size: int, block: int) -> Tensor:
    """Along one dimension: a scale for each item, one for all, or one for each block. The last may be cut."""
    if scale.shape[dim] in (1, size):
        return scale
    if scale.shape[dim] != math.ceil(size / block):
        expected = f"{math.ceil(size / block)} (blocks of {block})"
        raise ValueError(
            f"dimension {dim} of its scale has {scale.shape[dim]} numbers, not 1, {size} or {expected}"
        )
    return scale.repeat_interleave(block, dim).narrow(dim, 0, size)


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Whole numbers of `bits` bits, packed along `dim` into words of 32, the lowest bits first."""
    dim %= words.dim()
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    shape = [1] * (words.dim() + 1)
    shape[dim + 1] = len(shifts)
    apart = (words.unsqueeze(dim + 1) >> shifts.view(shape)) & ((1 << bits) - 1)
    return apart.flatten(dim, dim + 1)


class Grouped(NamedTuple):
    """Unsigned numbers [out, in] with a scale and a zero point for each group of inputs."""

    values: Tensor  # int32
    scales: Tensor  # [out, groups]
    zeros: Tensor | int  # int32 [out, groups], or one for all
    group_of: Tensor | None  # of each input; None: they are in a row

    def dequantized(self) -> Tensor:
        zeros = self.zeros if isinstance(self.zeros, int) else self._by_group(self.zeros)
        return (self.values - zeros).float() * self._by_group(self.scales.float())

    def _by_group(self, numbers: Tensor) -> Tensor:
        """[rows, groups] -> [rows, columns]"""
        columns, groups = self.values.shape[1], numbers.shape[1]
        if self.group_of is not None:
            return numbers[:, _checked(self.group_of, groups)]
        return numbers.repeat_interleave(math.ceil(columns / groups), 1)[:, :columns]


def packed_ints(
    packed: Tensor, scale: Tensor, shape: Tensor, zero_point: Tensor | None, group_of: Tensor | None
) -> Grouped:
    """compressed-tensors: half their range was added to numbers and zero points before packing."""
    rows, columns = (int(size) for size in shape.tolist())
    bits = next((b for b in (4, 8) if packed.shape[1] == math.ceil(columns / (32 // b))), None)
    if bits is None or len(packed) != rows:
        raise ValueError(
            f"its packed shape {list(packed.shape)} does not hold the weight_shape {[rows, columns]}"
        )
    values = unpack(packed, bits, 1)[:, :columns]
    zeros = 1 << (bits - 1) if zero_point is None else unpack(zero_point, bits, 0)[:rows]
    if len(scale) not in (1, rows):
        raise ValueError(f"its weight_scale has the shape {list(scale.shape)} for {rows} rows")
    if isinstance(zeros, Tensor) and zeros.shape != (rows, scale.shape[1]):
        raise ValueError(
            f"its weight_zero_point holds {list(zeros.shape)} numbers, and not {[rows, scale.shape[1]]}"
        )
    is_ordered = group_of is not None and bool((group_of >= 0).all())
    return Grouped(values, scale, zeros, group_of if is_ordered else None)


def _checked(group_of: Tensor, groups: int) -> Tensor:
    if not 0 <= int(group_of.min()) <= int(group_of.max()) < groups:
        raise ValueError(f"its g_idx names the group {int(group_of.max())} of {groups}")
    return group_of.long()


def gptq(
    words: Tensor, zero_words: Tensor, scales: Tensor, group_of: Tensor | None, bits: int, zero_offset: int
) -> Grouped:
    """Packed along the inputs, stored [in, out]; `group_of` is there with and without `desc_act`."""
    values = unpack(words, bits, 0)
    zeros = unpack(zero_words, bits, 1)[:, : scales.shape[1]] + zero_offset
    return _transposed(values, scales, zeros, group_of)


def awq(words: Tensor, zero_words: Tensor, scales: Tensor) -> Grouped:
    """Packed along the outputs in an order of its own, stored [in, out]."""
    return _transposed(_awq_columns(words), scales, _awq_columns(zero_words), None)


def _awq_columns(words: Tensor) -> Tensor:
    apart = unpack(words, 4, 1).view(len(words), -1, 8)
    return apart[..., list(_AWQ_ORDER)].flatten(1)


def _transposed(values: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor | None) -> Grouped:
    """Of tensors that are stored [in, out]."""
    if (values.shape[1], zeros.shape) != (scales.shape[1], scales.shape):
        raise ValueError(f"its numbers {list(values.shape)} and scales {list(scales.shape)} do not agree")
    if group_of is None and len(values) % len(scales):
        raise ValueError(f"its {len(values)} inputs are not {len(scales)} groups of one size")
    if group_of is not None and len(group_of) != len(values):
        raise ValueError(f"its g_idx has {len(group_of)} numbers for {len(values)} inputs")
    return Grouped(values.T.contiguous(), scales.T.contiguous(), zeros.T.contiguous(), group_of)


def fp4(packed: Tensor, scale: Tensor, factor: Tensor) -> Tensor:
    """Two numbers a byte, the low half first; a scale for each group along the last dimension.

    NVFP4: scales are FP8, and `factor` is for the whole weight. MXFP4: scales are powers of two, as bytes.
    """
    table = torch.tensor([*_FP4, *(-number for number in _FP4)], device=packed.device)
    halves = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    values = table[halves.int()]
    powers = torch.exp2(scale.float() - _E8M0_BIAS) if scale.dtype == torch.uint8 else scale.float()
    if scale.shape[:-1] != values.shape[:-1] or values.shape[-1] % scale.shape[-1]:
        raise ValueError(
            f"its scale has the shape {list(scale.shape)}, the packed weight {list(packed.shape)}"
        )
    return values * (powers * factor).repeat_interleave(values.shape[-1] // scale.shape[-1], -1)
