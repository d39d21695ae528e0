"""Stored parts of one quantised weight, before they are read: kinds, sizes, numbers that are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_WHOLE = (".qweight", ".qzeros", ".weight_packed", ".weight_shape")  # .weight_zero_point may be a float's
_SCALES = (
    ".weight_scale_inv",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_global_scale",
    ".scales",
    "_scale_inv",
    "_scale",
)
_FACTORS = (".weight_scale_2", ".weight_global_scale")  # of NVFP4


def check_parts(parts: Mapping[str, Tensor]) -> None:
    """ValueError: the end of a sentence that begins with the weight's name."""
    for part, tensor in parts.items():
        name = part.lstrip("._")
        if tensor.is_floating_point():
            if part in _WHOLE:
                raise ValueError(f"its {name} is {_dtype(tensor)}, and whole numbers are needed")
            if part in _SCALES and not bool(tensor.float().isfinite().all()):
                raise ValueError(f"its {name} has numbers that are not finite")
        if part == ".weight_shape" and tensor.numel() != 2:
            raise ValueError(f"its {name} is {tensor.flatten().tolist()[:4]}, not two sizes")
        if part in _FACTORS and tensor.numel() != 1:
            raise ValueError(f"its {name} has {tensor.numel()} numbers, not one")
    check_sizes({part: tensor.shape for part, tensor in parts.items()})
    _check_fp4(parts)
    _check_groups(parts)


def check_sizes(shapes: Mapping[str, Sequence[int]]) -> None:
    """Of whole numbers in groups, before any of them is read. ValueError, as above."""
    if ".qweight" in shapes:
        matrices: tuple[str, ...] = (".qweight", ".qzeros", ".scales")
    elif ".weight_shape" in shapes:
        matrices = (".weight_packed", ".weight_scale", ".weight_zero_point")
    else:
        return
    for part in matrices:
        shape = shapes.get(part, (1, 1))
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"its {part[1:]} has the shape {list(shape)}, not rows and columns")


def _check_fp4(parts: Mapping[str, Tensor]) -> None:
    """Scales of NVFP4 are FP8 and mean nothing without the factor of the whole weight."""
    packed = parts.get(".weight_packed", parts.get(".weight"))
    scale = parts.get(".weight_scale")
    if packed is None or scale is None or packed.dtype != torch.uint8:
        return
    if scale.dtype == torch.float8_e4m3fn and not any(part in parts for part in _FACTORS):
        factor = "weight_global_scale" if ".weight_packed" in parts else "weight_scale_2"
        raise ValueError(f"its {factor} is not in the checkpoint")


def _check_groups(parts: Mapping[str, Tensor]) -> None:
    """One for each input. A word of GPTQ holds 4 or 8 of them."""
    if {".weight_g_idx", ".weight_shape"} <= parts.keys():
        columns, inputs = parts[".weight_g_idx"].numel(), int(parts[".weight_shape"].flatten()[1])
        if columns != inputs:
            raise ValueError(f"its weight_g_idx has {columns} numbers for {inputs} inputs")
    if not {".g_idx", ".qweight"} <= parts.keys():
        return
    columns, words = parts[".g_idx"].numel(), len(parts[".qweight"])
    if columns not in (4 * words, 8 * words):
        raise ValueError(f"its g_idx has {columns} numbers, and its qweight {words} rows of 4 or 8 inputs")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
