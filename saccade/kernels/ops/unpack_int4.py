"""An INT4 weight as 16-bit floats, for GEMMs of many rows by cuBLAS. `gemm.int4_linear` has its layout."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 4
_CHUNKS = 8  # of 128 columns
_ROWS_AT_A_TIME = 1024


def unpack_int4(weight: Tensor, scales: Tensor, zeros: Tensor | None, out: Tensor) -> Tensor:
    """int16 [N, K / 4] -> (q - zero) * scale in `out` [N, K], contiguous."""
    rows, columns = out.shape
    assert weight.shape == (rows, columns // 4) and weight.is_contiguous() and out.is_contiguous()
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(columns, 128 * _CHUNKS))
    _unpack_kernel[grid](
        weight, scales, zeros, out, rows, K=columns, GROUP=columns // scales.shape[1], ROWS=_ROWS, CHUNKS=_CHUNKS
    )
    return out


def unpack_without_kernel(weight: Tensor, scales: Tensor, zeros: Tensor | None, out: Tensor) -> Tensor:
    """The same by PyTorch, some rows at a time: for devices where the kernel fails, and its self-test."""
    columns = out.shape[1]
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=out.device)[:, None]
    for start in range(0, len(out), _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        units = weight[rows].to(torch.int32).view(-1, columns // 128, 1, 32)
        values = ((units >> shifts) & 15).view(len(units), scales.shape[1], -1)
        zero = 8 if zeros is None else zeros[rows].to(torch.int32)[..., None]
        out[rows] = ((values - zero).float() * scales[rows].float()[..., None]).flatten(1)
    return out


@triton.jit
def _unpack_kernel(
    weight: tl.tensor, scales: tl.tensor, zeros: tl.tensor, out: tl.tensor, N: tl.tensor,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None, None].to(tl.int64)
    chunks = (tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS))[None, :, None]
    units = tl.arange(0, 32)[None, None, :]
    inside = (rows < N) & (chunks < K // 128)  # [ROWS, CHUNKS, 1]
    numbers = tl.load(weight + rows * (K // 4) + chunks * 32 + units, mask=inside, other=0)
    for plane in tl.static_range(4):
        place = rows * (K // GROUP) + (chunks * 128 + plane * 32) // GROUP
        zero = tl.full([1, 1, 1], 8.0, tl.float32)
        if zeros is not None:
            zero = tl.load(zeros + place, mask=inside, other=0).to(tl.float32)
        scale = tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)
        values = (((numbers >> (4 * plane)) & 15).to(tl.float32) - zero) * scale
        tl.store(out + rows * K + chunks * 128 + plane * 32 + units, values.to(out.dtype.element_ty), mask=inside)
