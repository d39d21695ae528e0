"""Weights that stay in float8 on the device: which ones, their scales, and how they are made.

Scales are float32, [N / 128, K / 128] for blocks or [N, 1] for rows of a weight [N, K].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.checkpoint.quantization import Quantization, stays_fp8
from saccade.errors import ConfigError
from saccade.util.torch_utils import capability_of

BLOCK = 128
LARGEST = 448.0
FP8 = torch.float8_e4m3fn
_LAYERS = "decoder.layers."


class Fp8Weights(NamedTuple):
    in_blocks: bool  # else each row has a scale
    names: frozenset[str] | None = None  # targets that a checkpoint has so; None: all of the decoder's layers

    def empty(
        self, parts: Mapping[str, int], shape: tuple[int, ...], device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        """For one GEMM over parts of these names and rows, with scales; None: it is dequantised."""
        if not self.keep(parts, shape[-1]):
            return None
        scales = torch.empty(self.scales_shape(*shape), dtype=torch.float32, device=device)
        return torch.empty(shape, dtype=FP8, device=device), scales

    def keep(self, parts: Mapping[str, int], inputs: int) -> bool:
        """Whether one GEMM over parts of these names and rows stays so."""
        if not stays_fp8(parts.values(), inputs, in_blocks=self.in_blocks):
            return False
        return self.has(*parts)

    def has(self, *names: str) -> bool:
        """Whether all of these are so."""
        return all(name.startswith(_LAYERS) if self.names is None else name in self.names for name in names)

    def are_alike(self, *names: str) -> bool:
        """Whether all of these are so, and can be one tensor."""
        return self.has(*names)

    def scales_shape(self, *shape: int) -> tuple[int, ...]:
        *stacked, outputs, inputs = shape
        counts = (outputs // BLOCK, inputs // BLOCK) if self.in_blocks else (outputs, 1)
        return *stacked, *counts


def multiplies_fp8(device: torch.device) -> bool:
    """From compute capability 8.9 on (Ada, Hopper, Blackwell)."""
    return capability_of(device) >= (8, 9)


def check_online(how: str, quantization: Quantization | None, device: torch.device) -> None:
    """Whether the weights of a checkpoint can be quantised while they load."""
    if how != "fp8":
        raise ConfigError(
            f"--quantization {how} is not known; fp8 is, and quantised checkpoints need no option"
        )
    if quantization is not None:
        if quantization.becomes_fp8:
            return  # without an option, too
        problem = f"this one is {quantization.summary}"
        raise ConfigError(f"--quantization {how} is for checkpoints that are not quantised; {problem}")
    if not multiplies_fp8(device):
        raise ConfigError(f"--quantization {how} needs a GPU of compute capability 8.9 or more, not {device}")


def quantized(weight: Tensor, in_blocks: bool, unit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[..., N, K] -> float8 and its scales: the largest of a block or row becomes 448, the largest.

    `unit`: scales are powers of two of it. Numbers that have few bits as multiples of it stay as they are.
    """
    if not in_blocks:
        scales = _scales(weight.float().abs().amax(-1, keepdim=True), unit)
        return (weight / scales).to(FP8), scales
    blocks = _blocks(weight).float()
    scales = _scales(blocks.abs().amax((-3, -1)), unit)
    return (blocks / scales[..., :, None, :, None]).reshape(weight.shape).to(FP8), scales


def has_blocks(weight: Tensor, scales: Tensor) -> bool:
    """Whether scales are for blocks; else there is one for each row."""
    return scales.shape[-2] != weight.shape[-2]


def dequantized(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The reference: [..., N, K] times its scales."""
    wide = weight.to(dtype)
    if not has_blocks(weight, scales):
        return wide.mul_(scales)
    _blocks(wide).mul_(scales[..., :, None, :, None])
    return wide


def _blocks(weight: Tensor) -> Tensor:
    """A view [..., rows of blocks, 128, columns of blocks, 128]"""
    *stacked, rows, columns = weight.shape
    return weight.view(*stacked, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)


def _scales(largest: Tensor, unit: Tensor | None) -> Tensor:
    scales = (largest / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    return scales if unit is None else (scales / unit).log2_().ceil_().exp2_().mul_(unit)


def scales_for(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """A checkpoint's scales of a weight as they are here: one for all becomes one for each row."""
    scales = scale.float()
    if scales.numel() == 1:
        return scales.reshape([1] * len(shape)).expand(*shape)
    if shape[-1] == 1:
        if scales.shape[-1] != 1:
            scales = scales.unsqueeze(-1)
        if list(scales.shape) == list(shape[1:]):
            return scales.expand(*shape)  # of a matrix that is cut by columns: its parts have the same rows
    if scales.numel() != math.prod(shape):
        raise ValueError(f"its scale has the shape {list(scale.shape)}; {list(shape)} was expected")
    if scales.dim() == 2 and len(shape) == 3 and len(scales) == shape[1]:
        return scales.view(len(scales), shape[0], -1).transpose(0, 1)
    return scales.reshape(*shape)


def is_in_blocks(scale: Sequence[int], weight: Sequence[int]) -> bool:
    """Whether scales of this shape are for blocks of 128 x 128."""
    if not 2 <= len(scale) == len(weight):
        return False
    blocks = [-(-size // BLOCK) for size in weight[-2:]]
    return list(scale[-2:]) == blocks


def is_by_row(scale: Sequence[int], weight: Sequence[int]) -> bool:
    rows = list(weight[:-1])
    return list(scale) in ([], [1], rows, [*rows, 1])
