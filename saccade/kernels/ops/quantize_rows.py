"""Rows to float8, with a scale for each group of columns: largest magnitude / 448."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 448.0  # of float8_e4m3fn
SMALLEST_SCALE = 1e-10  # rows of zeros
_PADDED = 4  # rows with scales for groups: cuBLAS reads 16 bytes of them at a time
_COLUMNS = 1024  # of a group of 128 columns that a program has


class Fp8Rows(NamedTuple):
    """x [M, K] as values * scales. Rows after the last are padding."""

    values: Tensor  # float8 [M', K]
    scales: Tensor  # float32 [K / group, M']
    rows: int  # M

    @property
    def group(self) -> int:
        """Columns with one scale."""
        return self.values.shape[1] // len(self.scales)


def new_fp8_rows(x: Tensor, group: int) -> Fp8Rows:
    """Memory for x [M, K] in float8: M' is M, of groups up to a multiple of 4."""
    rows, columns = x.shape
    padded = rows if group == columns else -(-rows // _PADDED) * _PADDED
    values = torch.empty((padded, columns), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((columns // group, padded), dtype=torch.float32, device=x.device)
    return Fp8Rows(values, scales, rows)


def quantize_rows(x: Tensor, group: int) -> Fp8Rows:
    rows, columns = x.shape
    assert x.stride(1) == 1 and columns % group == 0, (x.shape, group)
    whole = group == columns
    quantized = new_fp8_rows(x, group)
    padded = len(quantized.values)
    width = triton.next_power_of_2(columns) if whole else min(_COLUMNS, triton.next_power_of_2(columns))
    _quantize_kernel[(padded, triton.cdiv(columns, width))](
        x, quantized.values, quantized.scales, rows, padded, x.stride(0), K=columns, WIDTH=width,
        GROUP=width if whole else group, SMALLEST=SMALLEST_SCALE, LARGEST=LARGEST, num_warps=8 if width > 4096 else 4,
    )  # fmt: skip
    return quantized


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
    numbers = tl.load(x + tl.minimum(row, rows - 1) * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    scaled = quantize_groups(numbers, scales + groups * padded + row, groups * GROUP < K, LARGEST, SMALLEST)
    tl.store(values + row * K + columns, scaled.to(values.dtype.element_ty), mask=inside)


@triton.jit
def quantize_groups(
    numbers: tl.tensor, scales: tl.tensor, inside: tl.tensor, LARGEST: tl.constexpr, SMALLEST: tl.constexpr
) -> tl.tensor:
    """[groups, columns] over the scales of groups, which are stored."""
    scale = tl.maximum(tl.max(tl.abs(numbers), 1) / LARGEST, SMALLEST)
    tl.store(scales, scale, mask=inside)
    return numbers / scale[:, None]
