"""Linear layers, merged projections, and patch embedding as a GEMM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.models import int4_weights
from saccade.models.fp8_weights import dequantized
from saccade.models.int4_weights import GroupScales
from saccade.models.layers.packed_linear import Gemm, pack, packed_linear, padded_rows
from saccade.models.state_dict import Parameters, Scales


class Linear:
    """x @ weight.T + bias. Several projections of one input are one GEMM: give `outputs` as {name: size}.

    Where the checkpoint's weight stays in float8, `scales` are beside it (`fp8_weights`); where it stays in
    INT4, `groups` are, and the weight is packed (`int4_weights`).

    `pad_outputs` pads each of them with zero rows to a multiple, `pad_inputs` the weight with zero columns,
    so that the tensor between two GEMMs can be wider than in the checkpoint. `tensors`: names and rows
    of the checkpoint's tensors, where they are others than the parts.
    """

    def __init__(
        self,
        params: Parameters,
        inputs: int,
        outputs: int | Mapping[str, int],
        *,
        bias: bool = False,
        pad_inputs: int = 1,
        pad_outputs: int = 1,
        tensors: Mapping[str, int] | None = None,
    ) -> None:
        parts = {"": outputs} if isinstance(outputs, int) else outputs
        sizes = [_up_to(size, pad_outputs) for size in parts.values()]
        shape = (sum(sizes), _up_to(inputs, pad_inputs))
        names = [_join(name, "weight") for name in parts]
        self.inputs = shape[1]
        self.hold(*params.empty_weight(_weights(tensors or parts), *shape))
        self.bias = params.empty(sum(sizes)) if bias else None  # [outputs]
        weights = torch.split(self.weight, sizes)
        of_parts = self._scales_of(sizes)
        for name, size, rows, scales in zip(names, parts.values(), weights, of_parts, strict=True):
            params.add(name, rows if self.groups else _own_part(rows, size, inputs), scales)
        if self.bias is not None:
            for (name, size), values in zip(parts.items(), torch.split(self.bias, sizes), strict=True):
                params.add(_join(name, "bias"), _own_part(values, size))
        params.linears.append(self)

    def __call__(self, x: Tensor) -> Tensor:
        return self.gemm(x, self.weight, self.bias)

    def hold(self, weight: Tensor, scales: Scales | None = None) -> None:
        """`weight`: [outputs, inputs], or what is stored of it."""
        self.weight = weight
        self.groups = scales if isinstance(scales, GroupScales) else None
        self.scales = None if isinstance(scales, GroupScales) else scales
        self.gemm: Gemm = F.linear if scales is None else self._dequantized_linear

    def by_row(self) -> Iterator[Tensor]:
        """What has a value, or more, for each output. Scales of blocks have not."""
        groups = () if self.groups is None else (self.groups.scales, self.groups.zeros)
        for tensor in (self.weight, self.bias, self.scales, *groups):
            if tensor is not None and len(tensor) == len(self.weight):
                yield tensor

    def _scales_of(self, sizes: list[int]) -> Sequence[Scales | None]:
        """The scales of each part."""
        if self.groups is not None:
            ends = list(accumulate(sizes))
            return [self.groups.at(slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
        if self.scales is None:
            return [None] * len(sizes)
        rows = sum(sizes) // len(self.scales)  # with one scale
        return torch.split(self.scales, [size // rows for size in sizes])

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """What a weight in float8 or INT4 stands for: [outputs, inputs]."""
        if self.groups is not None:
            return int4_weights.dequantized(self.weight, self.groups, dtype)
        assert self.scales is not None
        return dequantized(self.weight, self.scales, dtype)

    def _dequantized_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The reference for the kernels that read float8 or INT4."""
        return F.linear(x, self.dequantized(x.dtype), bias)

    def padding(self, rows: int) -> int:
        """Rows that a call with so many rows would add to them."""
        return padded_rows(rows, self.weight.dtype) - rows if self.weight.is_mkldnn else 0

    def pack(self) -> None:
        """Once weights are loaded; the originals are given up."""
        self.weight = pack(self.weight)
        self.gemm = packed_linear


class PatchLinear(Linear):
    """Patch embedding: a convolution with stride = kernel, as a GEMM over [patches, patch_dim]."""

    def __init__(self, params: Parameters, kernel: tuple[int, ...], outputs: int, bias: bool = False) -> None:
        self.gemm = F.linear
        self.scales = None
        self.groups = None
        convolution = params.new("weight", outputs, *kernel)
        self.weight = convolution.view(outputs, -1)  # [outputs, patch_dim]
        self.bias = params.new("bias", outputs) if bias else None
        params.linears.append(self)


def _weights(parts: Mapping[str, int]) -> dict[str, int]:
    return {_join(name, "weight"): size for name, size in parts.items()}


def _own_part(padded: Tensor, *sizes: int) -> Tensor:
    """The view of these sizes; the padding around it is set to zero."""
    if padded.shape == sizes:
        return padded
    padded.zero_()
    return padded[tuple(slice(size) for size in sizes)]


def _up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)
