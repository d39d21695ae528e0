"""Linear layers, merged projections, and patch embedding as a GEMM."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.models.layers.packed_linear import Gemm, pack, packed_linear, padded_rows
from saccade.models.state_dict import Parameters


class Linear:
    """x @ weight.T + bias. Several projections of one input are one GEMM: give `outputs` as {name: size}.

    `pad_outputs` pads each of them with zero rows to a multiple, `pad_inputs` the weight with zero columns,
    so that the tensor between two GEMMs can be wider than in the checkpoint.
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
    ) -> None:
        parts = {"": outputs} if isinstance(outputs, int) else outputs
        sizes = [_up_to(size, pad_outputs) for size in parts.values()]
        shape = (sum(sizes), _up_to(inputs, pad_inputs))
        self.gemm: Gemm = F.linear
        self.weight = params.empty(*shape)  # [outputs, inputs]
        self.bias = params.empty(sum(sizes)) if bias else None  # [outputs]
        for (name, size), rows in zip(parts.items(), torch.split(self.weight, sizes), strict=True):
            params.add(_join(name, "weight"), _own_part(rows, size, inputs))
        if self.bias is not None:
            for (name, size), values in zip(parts.items(), torch.split(self.bias, sizes), strict=True):
                params.add(_join(name, "bias"), _own_part(values, size))
        params.linears.append(self)

    def __call__(self, x: Tensor) -> Tensor:
        return self.gemm(x, self.weight, self.bias)

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
        stored = params.new("weight", outputs, *kernel)
        self.weight = stored.view(outputs, -1)  # [outputs, patch_dim]
        self.bias = params.new("bias", outputs) if bias else None
        params.linears.append(self)


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
