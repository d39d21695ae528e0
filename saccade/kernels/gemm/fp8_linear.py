"""GEMMs of many rows with a float8 weight: x is quantised, too, and cuBLAS multiplies both in float8.

    weight scales [N / 128, K / 128]    x gets a scale for 128 columns of each row
    weight scales [N, 1]                x gets a scale for each row

The caller asks `has_fp8_gemm` first: not every device has one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels.launch.device import gpu_of
from saccade.kernels.ops.quantize_rows import quantize_rows
from saccade.kernels.ops.scaled_weight import BLOCK, block_of

_FP8_GPUS = ((8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
_BLOCK_GPUS = ((9, 0),)  # whose cuBLAS takes scales of blocks as float32


def fp8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x [M, K], weight float8 [N, K] -> x @ (weight * scales).T + bias: [M, N]."""
    in_blocks = block_of(weight, scales) > 0
    assert has_fp8_gemm(x, in_blocks=in_blocks), (x.device, x.dtype, scales.shape)
    values, of_values = quantize_rows(x, BLOCK if in_blocks else x.shape[1])
    rows = len(x)
    if out is None or len(values) > rows:  # padded
        made = torch.empty((len(values), len(weight)), dtype=x.dtype, device=x.device)
    else:
        made = out
    torch._scaled_mm(values, weight.T, of_values.T, scales.T, out_dtype=x.dtype, use_fast_accum=not in_blocks, out=made)
    found = made[:rows] if bias is None else made[:rows].add_(bias)
    return found if out is None or made is out else out.copy_(found)


def has_fp8_gemm(x: Tensor, *, in_blocks: bool) -> bool:
    """Whether its device has one whose result is of its dtype."""
    capability = gpu_of(x.device).capability
    return x.dtype == torch.bfloat16 and capability in (_BLOCK_GPUS if in_blocks else _FP8_GPUS)
