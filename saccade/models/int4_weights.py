"""INT4 weights that stay packed on the device: their layout, whatever the checkpoint's was.

A weight [N, K] of numbers from 0 to 15 is int16 [N, K / 4]. Columns are in chunks of 128, and a chunk is 32
units of 16 bits. A unit has a number of each of the chunk's four planes, which are 32 columns each:

    bits of unit i     15 .. 12     11 .. 8      7 .. 4       3 .. 0
    column             96 + i       64 + i       32 + i       i

So one shift and one mask give 32 columns in a row, for two units of a register at once; and a plane is within
one group, be it of 32, 64 or 128 columns. Number q of a group stands for (q - zero) * scale.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.util.torch_utils import capability_of

CHUNK = 128
GROUPS = (32, 64, 128)
DEFAULT_ZERO = 8  # of groups without zero points
_PLANES = 4
_BITS = 4
_MEAN_DEVIATION = 4.61  # of numbers from 0 to 15 that are equally likely
_LAYERS = "decoder.layers."


class GroupScales(NamedTuple):
    """Beside a packed weight [N, K / 4], for its groups of columns; those of experts are stacked."""

    scales: Tensor  # float16 or bfloat16 [N, K / group]
    zeros: Tensor | None = None  # uint8 [N, K / group]; None: all are 8
    order: Tensor | None = None  # int64 [K]: inputs in the order of the columns; None: as they are

    def at(self, where: Any) -> GroupScales:
        """Those of some experts or rows of the weight, by their index."""
        return self.changed(lambda numbers: numbers[where])

    def changed(self, change: Callable[[Tensor], Tensor]) -> GroupScales:
        """With scales and zero points that became something else."""
        zeros = None if self.zeros is None else change(self.zeros)
        return self._replace(scales=change(self.scales), zeros=zeros)


class Int4Format(NamedTuple):
    """What the parts of one GEMM must have in common."""

    group: int
    has_zeros: bool
    dtype: torch.dtype  # of scales
    order: bytes | None = None  # a hash of `GroupScales.order`


@dataclass(frozen=True, slots=True)
class Int4Weights:
    """Which weights stay packed."""

    formats: Mapping[str, Int4Format]  # of targets that a checkpoint has so
    default: Int4Format | None = None  # of all others in the decoder's layers: random weights
    has_experts: bool = True  # whether kernels read experts
    apart: list[str] = field(default_factory=list)  # projections that do not, since their parts differ
    ordered: list[str] = field(default_factory=list)  # those of experts that have an order of inputs

    def empty(
        self, parts: Mapping[str, int], shape: tuple[int, ...], device: torch.device
    ) -> tuple[Tensor, GroupScales] | None:
        """For one GEMM over parts of these names and rows, or for experts; None: it is dequantised."""
        *rows, columns = shape
        formats = {int4 for name in parts if (int4 := self._format_of(name)) is not None}
        if columns % CHUNK or not self.has(*parts) or sum(parts.values()) != math.prod(rows):
            return None
        is_stacked = len(shape) == 3
        is_ordered = is_stacked and any(int4.order for int4 in formats)
        if is_ordered or len(formats) > 1:
            which = self.ordered if is_ordered else self.apart
            which.append(next(iter(parts)).removesuffix(".weight"))
            return None
        if is_stacked and not self.has_experts:
            return None
        (int4,) = formats
        groups = (*rows, columns // int4.group)
        zeros = torch.empty(groups, dtype=torch.uint8, device=device) if int4.has_zeros else None
        order = torch.empty(columns, dtype=torch.int64, device=device) if int4.order else None
        scales = GroupScales(torch.empty(groups, dtype=int4.dtype, device=device), zeros, order)
        return torch.empty((*rows, columns // _PLANES), dtype=torch.int16, device=device), scales

    def has(self, *names: str) -> bool:
        """Whether all of these are so."""
        return all(self._format_of(name) is not None for name in names)

    def are_alike(self, *names: str) -> bool:
        """Whether all of these are so, and can be one tensor."""
        return self.has(*names) and len({self._format_of(name) for name in names}) == 1

    def _format_of(self, name: str) -> Int4Format | None:
        return self.formats.get(name, self.default if name.startswith(_LAYERS) else None)


def keeps_int4(device: torch.device) -> bool:
    """From compute capability 8.0 on, as kernels multiply bfloat16."""
    return capability_of(device) >= (8, 0)


def suits(columns: int, groups: int) -> bool:
    """Whether kernels read so many columns with so many groups."""
    return columns % CHUNK == 0 and columns % groups == 0 and columns // groups in GROUPS


def order_of(group_of_column: Tensor | None, group: int) -> Tensor | None:
    """Columns by their groups; None: they are so. ValueError: groups have different sizes."""
    if group_of_column is None or bool((group_of_column < 0).any()):
        return None
    groups = group_of_column.long()
    if bool((groups[1:] >= groups[:-1]).all()):
        order = None
    else:
        order = groups.argsort(stable=True)
        groups = groups[order]
    if not torch.equal(groups, torch.arange(len(groups), device=groups.device) // group):
        raise ValueError(f"its groups are not of {group} columns each")
    return order


def hash_of(order: Tensor | None) -> bytes | None:
    return None if order is None else hashlib.sha256(order.cpu().numpy().tobytes()).digest()


def fill_packed(weight: Tensor, scales: GroupScales, generator: torch.Generator) -> None:
    """At random, scaled by fan-in, with scales of either sign.

    Numbers from 0 to 15 are half a step below their zero point. With scales of one sign that mean would grow
    from layer to layer until all tokens are alike, and go to the same experts.
    """
    weight.random_(-(2**15), 2**15, generator=generator)
    size = inputs_of(weight) ** -0.5 / _MEAN_DEVIATION
    scales.scales.bernoulli_(0.5, generator=generator).sub_(0.5).mul_(2 * size)
    if scales.zeros is not None:
        scales.zeros.fill_(DEFAULT_ZERO)


def group_of(weight: Tensor, scales: GroupScales) -> int:
    """Columns with one scale."""
    return inputs_of(weight) // scales.scales.shape[1]


def inputs_of(weight: Tensor) -> int:
    """The columns of a packed weight."""
    return weight.shape[-1] * _PLANES


def pack(values: Tensor) -> Tensor:
    """[N, K] from 0 to 15 -> int16 [N, K / 4]."""
    rows, columns = values.shape
    planes = values.to(torch.int32).view(rows, columns // CHUNK, _PLANES, CHUNK // _PLANES)
    units = sum(planes[:, :, plane] << (_BITS * plane) for plane in range(_PLANES))
    assert isinstance(units, Tensor)
    return units.to(torch.int16).flatten(1)  # the highest bit is the sign


def unpack(weight: Tensor) -> Tensor:
    """int16 [N, K / 4] -> int32 [N, K] from 0 to 15."""
    units = weight.to(torch.int32).view(len(weight), -1, 1, CHUNK // _PLANES)
    shifts = torch.arange(_PLANES, device=weight.device, dtype=torch.int32) * _BITS
    return ((units >> shifts[:, None]) & 15).flatten(1)


def dequantized(weight: Tensor, scales: GroupScales, dtype: torch.dtype) -> Tensor:
    """The reference: [N, K], columns in the order of the inputs."""
    group = group_of(weight, scales)
    values = unpack(weight).float().view(len(weight), -1, group)
    zeros = float(DEFAULT_ZERO) if scales.zeros is None else scales.zeros.float()[..., None]
    wide = ((values - zeros) * scales.scales.float()[..., None]).flatten(1).to(dtype)
    return wide if scales.order is None else torch.empty_like(wide).index_copy_(1, scales.order, wide)
