"""Rows to float8, with a scale for each group of columns: largest magnitude / 448."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 448.0  # of float8_e4m3fn
_SMALLEST_SCALE = 1e-10  # rows of zeros
_PADDED = 4  # rows with scales for groups: cuBLAS reads 16 bytes of them at a time
_COLUMNS = 1024  # of a group of 128 columns that a program has


def quantize_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [M, K] -> float8 [M', K], and scales float32 [K / group, M']; M' is M, of groups up to a multiple of 4."""
    rows, columns = x.shape
    assert x.stride(1) == 1 and columns % group == 0, (x.shape, group)
    whole = group == columns
    padded = rows if whole else -(-rows // _PADDED) * _PADDED
    values = torch.empty((padded, columns), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((columns // group, padded), dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(columns) if whole else min(_COLUMNS, triton.next_power_of_2(columns))
    _quantize_kernel[(padded, triton.cdiv(columns, width))](
        x, values, scales, rows, padded, x.stride(0), K=columns, WIDTH=width, GROUP=width if whole else group,
        SMALLEST=_SMALLEST_SCALE, LARGEST=LARGEST, num_warps=8 if width > 4096 else 4,
    )  # fmt: skip
    return values, scales


@triton.jit(do_not_specialize=["rows", "padded"])
def _quantize_kernel(
    x: tl.tensor, values: tl.tensor, scales: tl.tensor, rows: tl.tensor, padded: tl.tensor, x_row: tl.tensor,
    K: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr,
) -> None:  # fmt: skip
    """WIDTH columns of a row. Rows after the last are the last one again."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups = part * (WIDTH // GROUP) + tl.arange(0, WIDTH // GROUP)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [groups, GROUP]
    inside = columns < K
    found = tl.load(x + tl.minimum(row, rows - 1) * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(found), 1) / LARGEST, SMALLEST)
    tl.store(scales + groups * padded + row, scale, mask=groups * GROUP < K)
    scaled = tl.minimum(tl.maximum(found / scale[:, None], -LARGEST), LARGEST)
    tl.store(values + row * K + columns, scaled.to(values.dtype.element_ty), mask=inside)
