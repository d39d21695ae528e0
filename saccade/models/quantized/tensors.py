"""A quantised checkpoint as if it were not: weights by their usual names, dequantised as they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from saccade.checkpoint.quantization import Quantization
from saccade.errors import ConfigError
from saccade.models.fp8_weights import is_by_row, is_in_blocks, quantized
from saccade.models.int4_weights import GroupScales, Int4Format, hash_of, order_of, pack, suits
from saccade.models.quantized import dequantize
from saccade.models.quantized.checks import check_parts, check_sizes
from saccade.models.quantized.dequantize import Grouped
from saccade.models.tensor_files import TensorFiles

_UNUSED = (
    ".input_scale",
    ".input_global_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".kv_scale",
    ".output_scale",
    ".prob_scale",
)
_PARTS = (  # of a weight, beside the numbers themselves
    ".weight_scale_inv",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_shape",
    ".weight_zero_point",
    ".weight_g_idx",
    ".qzeros",
    ".scales",
    ".g_idx",
)
_NUMBERS = (".weight", ".weight_packed", ".qweight")
_STACKED = ("_scale_inv", "_scale")  # experts in one tensor: gate_up_proj and gate_up_proj_scale_inv
_FP8_SCALES = (".weight_scale_inv", ".weight_scale", *_STACKED)
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)

Parts = Mapping[str, Tensor]
Kind = tuple[str, list[int]]  # dtype and shape of a stored tensor
T = TypeVar("T")


class DequantizedTensors:
    """`file_of` has the names that an unquantised checkpoint would have."""

    def __init__(self, files: TensorFiles, quantization: Quantization, device: torch.device) -> None:
        self._files = files
        self._quantization = quantization
        self._device = device  # where weights are dequantised
        self._parts: dict[str, dict[str, str]] = {}  # weight -> kind of part -> stored name
        self.file_of: dict[str, Path] = {}
        for name, file in files.file_of.items():
            if name.endswith(_UNUSED):
                continue
            weight, part = self._weight_of(name)
            self._parts.setdefault(weight, {})[part] = name
            if part in ("", *_NUMBERS):
                self.file_of[weight] = file
        self._check_whole()
        self._kept = Counter[str]()  # weights that were read as they are, by kind
        self._made = 0  # from FP4

    def summary(self) -> str:
        """What became of the weights that have been read."""
        count = sum(len(parts) > 1 for parts in self._parts.values())
        rest_count = count - self._kept.total() - self._made
        fates = {f"{number} stay in {kind}": number for kind, number in self._kept.items()}
        fates |= {
            f"{self._made} become FP8, since no kernel here multiplies FP4": self._made,
            f"{rest_count} are dequantised as they load": rest_count,
        }
        summary = ", ".join(fate for fate, number in fates.items() if number) or "all are as they were"
        return f"{count} weights are stored as {self._quantization.summary}: {summary}"

    def _weight_of(self, name: str) -> tuple[str, str]:
        """The usual name of a weight, and which part of it this is."""
        for part in (*_NUMBERS, *_PARTS):
            if name.endswith(part):
                return name.removesuffix(part) + ".weight", part
        for ending in _STACKED:
            if name.endswith(ending) and name.removesuffix(ending) in self._files.file_of:
                return name.removesuffix(ending), ending
        return name, ""

    def _check_whole(self) -> None:
        for weight, parts in self._parts.items():
            if weight not in self.file_of:
                raise ConfigError(f"the checkpoint has {', '.join(parts.values())} and not the weight itself")

    def is_plain(self, name: str) -> bool:
        """Whether it is stored as numbers alone."""
        return len(self._parts[name]) == 1

    def is_needless(self, name: str) -> bool:
        """GPTQ writes a bias of zeros for layers that have none."""
        weight = name.removesuffix("bias") + "weight"
        is_beside = ".qweight" in self._parts.get(weight, ())
        return is_beside and name.endswith(".bias") and not self._files.read(name).any()

    def shape(self, name: str) -> list[int]:
        """Of the weight that is meant, before anything of it is read."""
        parts = self._parts[name]
        kinds = {part: self._files.kind(full) for part, full in parts.items()}
        packed = self._int4_shape(parts, kinds)
        if packed is not None:
            return list(packed)
        *rows, columns = next(kinds[part][1] for part in ("", *_NUMBERS) if part in kinds)
        return [*rows, 2 * columns if self._is_fp4(name) else columns]

    def fp8_weights(self) -> dict[str, bool]:
        """Weights that are stored in float8, and whether their scales are for blocks of 128 x 128."""
        in_blocks_of = {}
        for name, parts in self._parts.items():
            numbers = next((parts[part] for part in ("", ".weight") if part in parts), None)
            scales = next((parts[part] for part in _FP8_SCALES if part in parts), None)
            if numbers is None or scales is None or ".weight_zero_point" in parts:
                continue
            dtype, shape = self._files.kind(numbers)
            of_scales = self._files.kind(scales)[1]
            in_blocks = is_in_blocks(of_scales, shape)
            if dtype == "F8_E4M3" and (in_blocks or is_by_row(of_scales, shape)):
                in_blocks_of[name] = in_blocks
        return in_blocks_of

    def fp4_weights(self) -> list[str]:
        """Weights that are stored as two numbers a byte."""
        return [name for name in self._parts if self._is_fp4(name)]

    def _is_fp4(self, name: str) -> bool:
        parts = self._parts[name]
        packed = next((parts[part] for part in (".weight_packed", ".weight", "") if part in parts), None)
        return len(parts) > 1 and packed is not None and self._files.kind(packed)[0] == "U8"

    def read_fp8(self, name: str, in_blocks: bool) -> tuple[Tensor, Tensor] | None:
        if len(self._parts[name]) == 1:
            return None
        if self._is_fp4(name):
            self._made += 1
            return quantized(self.read(name), in_blocks, _factor(self._stored(name)))
        self._kept["FP8"] += 1
        parts = self._stored(name)
        return _first(parts, ".weight", ""), _first(parts, *_FP8_SCALES)

    def _stored(self, name: str) -> Parts:
        parts = {part: self._files.read(full).to(self._device) for part, full in self._parts[name].items()}
        try:
            check_parts(parts)
        except ValueError as error:
            raise ConfigError(f"{name} cannot be dequantised: {error}") from None
        return parts

    def int4_weights(self) -> dict[str, Int4Format]:
        """Weights that are stored in INT4 and can stay so."""
        formats = {}
        for name, parts in self._parts.items():
            try:
                formats[name] = self._int4_format(parts)
            except ValueError as error:
                raise ConfigError(f"{name} cannot be read: {error}") from None
        return {name: int4 for name, int4 in formats.items() if int4 is not None}

    def _int4_format(self, parts: Mapping[str, str]) -> Int4Format | None:
        kinds = {part: self._files.kind(full) for part, full in parts.items()}
        check_sizes({part: shape for part, (_, shape) in kinds.items()})
        shape = self._int4_shape(parts, kinds)
        scale = next((kinds[part] for part in (".scales", ".weight_scale") if part in kinds), None)
        if shape is None or scale is None or len(scale[1]) != 2:
            return None
        groups = scale[1][0 if ".scales" in kinds else 1]
        if not suits(shape[1], groups):
            return None
        group_of = next((parts[part] for part in (".g_idx", ".weight_g_idx") if part in parts), None)
        try:
            order = order_of(None if group_of is None else self._files.read(group_of), shape[1] // groups)
        except ValueError:
            return None
        has_zeros = any(part in parts for part in (".qzeros", ".weight_zero_point"))
        dtype = torch.bfloat16 if scale[0] == "BF16" else torch.float16
        return Int4Format(shape[1] // groups, has_zeros, dtype, hash_of(order))

    def _int4_shape(self, parts: Mapping[str, str], kinds: Mapping[str, Kind]) -> tuple[int, int] | None:
        """Outputs and inputs of a weight in INT4."""
        if ".weight_packed" in kinds and ".weight_shape" in parts:
            shape_tensor = self._files.read(parts[".weight_shape"])
            check_parts({".weight_shape": shape_tensor})
            rows, columns = (int(size) for size in shape_tensor.flatten().tolist())
            dtype, shape = kinds[".weight_packed"]
            return (rows, columns) if dtype == "I32" and shape == [rows, columns // 8] else None
        if ".qweight" not in kinds or self._quantization.bits != 4:
            return None
        first, second = kinds[".qweight"][1]
        return (8 * second, first) if self._quantization.method == "awq" else (second, 8 * first)

    def read_int4(self, name: str) -> tuple[Tensor, GroupScales]:
        """Packed, with what is beside it."""
        self._kept["INT4"] += 1
        grouped = self._reading(name, _grouped)
        assert grouped is not None, name
        order = order_of(grouped.group_of, grouped.values.shape[1] // grouped.scales.shape[1])
        values = grouped.values if order is None else grouped.values[:, order]
        zeros = None if isinstance(grouped.zeros, int) else grouped.zeros.to(torch.uint8)
        return pack(values), GroupScales(grouped.scales, zeros, order)

    def read(self, name: str) -> Tensor:
        return self._reading(name, _weight)

    def _reading(self, name: str, read: Callable[[Parts, Quantization], T]) -> T:
        parts = self._stored(name)
        try:
            return read(parts, self._quantization)
        except (
            ValueError,
            IndexError,
            ArithmeticError,
            RuntimeError,
        ) as error:  # PyTorch: sizes that do not fit
            raise ConfigError(f"{name} cannot be dequantised: {error}") from None


def _weight(parts: Parts, quantization: Quantization) -> Tensor:
    if len(parts) == 1:
        (tensor,) = parts.values()
        if tensor.dtype in _INTEGERS:
            raise ValueError(f"it is stored as {str(tensor.dtype).removeprefix('torch.')} without a scale")
        return tensor
    grouped = _grouped(parts, quantization)
    if grouped is not None:
        return grouped.dequantized()
    if ".weight_packed" in parts:
        return dequantize.fp4(parts[".weight_packed"], _first(parts, ".weight_scale"), _factor(parts))
    numbers = _first(parts, ".weight", "")
    scale = _first(parts, *_FP8_SCALES)
    if numbers.dtype == torch.uint8:
        return dequantize.fp4(numbers, scale, _factor(parts))
    return dequantize.scaled(numbers, scale, quantization.block, parts.get(".weight_zero_point"))


def _grouped(parts: Parts, quantization: Quantization) -> Grouped | None:
    """Whole numbers in groups, if they are such."""
    packed = parts.get(".weight_packed")
    if packed is not None and packed.dtype != torch.uint8:
        options = parts.get(".weight_zero_point"), parts.get(".weight_g_idx")
        scale, shape = _first(parts, ".weight_scale"), _first(parts, ".weight_shape")
        return dequantize.packed_ints(packed, scale, shape, *options)
    if ".qweight" not in parts:
        return None
    words, zeros, scales = (_first(parts, part) for part in (".qweight", ".qzeros", ".scales"))
    if quantization.method == "awq":
        return dequantize.awq(words, zeros, scales)
    how = quantization.bits, quantization.zero_point_offset
    return dequantize.gptq(words, zeros, scales, parts.get(".g_idx"), *how)


def _factor(parts: Parts) -> Tensor:
    """Of a whole weight in FP4. MXFP4 has none."""
    whole = parts.get(".weight_global_scale")  # was multiplied into the scales, so that FP8 holds them
    if whole is not None:
        return whole.float().reciprocal()
    return parts.get(".weight_scale_2", torch.tensor(1.0, device=next(iter(parts.values())).device)).float()


def _first(parts: Parts, *names: str) -> Tensor:
    for name in names:
        if name in parts:
            return parts[name]
    raise ValueError(f"its {names[0].removeprefix('.')} is not in the checkpoint")
