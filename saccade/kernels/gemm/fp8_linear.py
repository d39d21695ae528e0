"""GEMMs of many rows with a float8 weight: x is quantised, too, and cuBLAS multiplies both in float8.

    weight scales [N / 128, K / 128]    x gets a scale for 128 columns of each row
    weight scales [N, 1]                x gets a scale for each row

The caller asks `has_fp8_gemm` first: not every device has one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.launch.device import gpu_of
from saccade.kernels.launch.kernel_choice import KernelChoice, assert_agree
from saccade.kernels.ops.quantize_rows import Fp8Rows, quantize_rows
from saccade.kernels.ops.scaled_weight import BLOCK, block_of

_FP8_GPUS = ((8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
_DTYPE = torch.bfloat16  # of results, and of rows that are not yet quantised
_BLOCK_GPUS = ((9, 0),)  # whose cuBLAS takes scales of blocks as float32


def fp8_linear(
    x: Tensor | Fp8Rows, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """x [M, K], weight float8 [N, K] -> x @ (weight * scales).T + bias: bfloat16 [M, N]."""
    in_blocks = block_of(weight, scales) > 0
    assert has_fp8_gemm(weight, _DTYPE, in_blocks=in_blocks), (weight.device, weight.shape, scales.shape)
    rows = _multiply(x, weight, scales, out, in_blocks)
    rows = rows if bias is None else rows.add_(bias)
    return rows if out is None or rows.data_ptr() == out.data_ptr() else out.copy_(rows)


def _multiply(x: Tensor | Fp8Rows, weight: Tensor, scales: Tensor, out: Tensor | None, in_blocks: bool) -> Tensor:
    """In `out`, if it can be written there."""
    if isinstance(x, Tensor):
        assert x.dtype == _DTYPE, x.dtype
        x = quantize_rows(x, BLOCK if in_blocks else x.shape[1])
    values, of_values, rows = x
    target = out
    is_padded = len(values) > rows
    if target is None or is_padded or not _writes_to(target, in_blocks):
        target = torch.empty((len(values), len(weight)), dtype=_DTYPE, device=weight.device)
    torch._scaled_mm(
        values, weight.T, of_values.T, scales.T, out_dtype=_DTYPE, use_fast_accum=not in_blocks, out=target
    )
    return target[:rows]


def _writes_to(out: Tensor, in_blocks: bool) -> bool:
    """cuBLAS takes rows that are apart, each beginning at 16 bytes. CUTLASS, for scales of rows, may not."""
    return out.is_contiguous() or (in_blocks and out.stride(0) * out.element_size() % 16 == 0)


def has_fp8_gemm(weight: Tensor, dtype: torch.dtype, *, in_blocks: bool) -> bool:
    """Whether its device has one for its width, and rows of a dtype. cuBLAS reads scales of blocks four at a time."""
    is_whole = not in_blocks or weight.shape[-1] % (4 * BLOCK) == 0
    return dtype == _DTYPE and is_whole and fp8_gemm(weight.device, in_blocks)


def _supports(device: torch.device, in_blocks: bool) -> bool:
    return gpu_of(device).capability in (_BLOCK_GPUS if in_blocks else _FP8_GPUS)


def _self_test(device: torch.device, in_blocks: bool) -> None:
    x = torch.randn(12, 4 * BLOCK, device=device, dtype=torch.bfloat16)
    weight = (torch.randn(2 * BLOCK, 4 * BLOCK, device=device) * 16).to(torch.float8_e4m3fn)
    scales = torch.full((2, 4) if in_blocks else (2 * BLOCK, 1), 1 / 362, device=device)  # sums near 1
    expected = F.linear(x.float(), weight.float() / 362)
    apart = x.new_empty(len(x), 3 * BLOCK)[:, : 2 * BLOCK]
    for out in (None, apart):
        assert_agree(_multiply(x, weight, scales, out, in_blocks).float(), expected, 0.25)


fp8_gemm = KernelChoice("the FP8 GEMM of many rows", _supports, _self_test, "weights are dequantised for it")
"""(device, whether scales are for blocks). Decided before a CUDA graph is captured."""
