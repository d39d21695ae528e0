"""Steps that the kernels of skinny GEMMs have in common."""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.kernels.launch.pdl import prefetch_l2
from saccade.kernels.ops.gate import gated


@triton.jit
def prefetch_weights(weight_rows: tl.tensor, to_up: tl.tensor, GATED: tl.constexpr, PREFETCH: tl.constexpr) -> None:
    """The first PREFETCH cache lines of each weight row."""
    if PREFETCH > 0:
        of_line: tl.constexpr = 1024 // weight_rows.dtype.element_ty.primitive_bitwidth  # elements
        lines = weight_rows + tl.arange(0, PREFETCH)[None, :] * of_line  # [OUTPUTS, PREFETCH]
        prefetch_l2(lines)
        if GATED:
            prefetch_l2(lines + to_up)


@triton.jit
def scale_rows(
    acc: tl.tensor, up: tl.tensor, scales: tl.tensor, columns: tl.tensor, N: tl.tensor,
    BLOCK: tl.constexpr, GATED: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """[OUTPUTS, ROWS] each: times the scale of each weight row, if there are such."""
    if scales is not None and BLOCK == 0:
        acc *= tl.load(scales + tl.minimum(columns, N - 1))[:, None]
        if GATED:
            up *= tl.load(scales + N + tl.minimum(columns, N - 1))[:, None]
    return acc, up


@triton.jit
def scale_and_gate(
    acc: tl.tensor, up: tl.tensor, squares: tl.tensor, norm: tl.tensor, eps: tl.tensor,
    K: tl.constexpr, GATED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[OUTPUTS, ROWS]: the norm's divisor, and silu(gate) * up; with GELU where GATED is 2."""
    if norm is not None:
        scale = tl.rsqrt(squares / K + eps)[None, :]
        acc *= scale
        up *= scale
    if GATED:
        acc = gated(acc, up, GATED == 2)
    return acc


@triton.jit
def combine_splits(first: tl.tensor, step: tl.constexpr, SPLITS: tl.constexpr) -> tl.tensor:
    """Other SMs wrote the partials, so loads bypass L1; always in the same order."""
    total = tl.load(first, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(first + split * step, cache_modifier=".cg")
    return total


@triton.jit
def store_outputs(
    acc: tl.tensor, bias: tl.tensor, residual: tl.tensor, out: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, M: tl.tensor, N: tl.tensor, out_row: tl.tensor,
) -> None:  # fmt: skip
    """found [OUTPUTS, ROWS] -> out [M, N], with bias [N] and residual [M, N] where there are any."""
    inside = (columns < N)[:, None] & (rows < M)[None, :]
    if bias is not None:
        acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    if residual is not None:
        places = residual + rows[None, :].to(tl.int64) * N + columns[:, None]
        acc += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + rows[None, :].to(tl.int64) * out_row + columns[:, None], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def finish_tile(
    acc: tl.tensor, acc_up: tl.tensor, total: tl.tensor, bias: tl.tensor, residual: tl.tensor, norm: tl.tensor,
    out: tl.tensor, partials: tl.tensor, squares: tl.tensor, counters: tl.tensor, eps: tl.tensor, rows: tl.tensor,
    columns: tl.tensor, M: tl.tensor, N: tl.tensor, out_row: tl.tensor,
    K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr,
) -> None:  # fmt: skip
    """Write a tile [OUTPUTS, ROWS]; of splits the last one to arrive does, after the others left their partials."""
    tile, split = tl.program_id(0), tl.program_id(1)
    if SPLITS == 1:
        sums = scale_and_gate(acc, acc_up, total, norm, eps, K, GATED)
        store_outputs(sums, bias, residual, out, rows, columns, M, N, out_row)
    else:
        cell = (tile * SPLITS).to(tl.int64) * ROWS  # the tile's first row in the workspace
        partial = partials + cell * OUTPUTS + tl.arange(0, OUTPUTS)[:, None] * ROWS + rows[None, :]
        tl.store(partial + split * OUTPUTS * ROWS, acc)
        tl.store(squares + cell + split * ROWS + rows, total)
        tl.debug_barrier()  # all threads have stored before one of them counts this split
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1:
            acc = combine_splits(partial, OUTPUTS * ROWS, SPLITS)
            total = combine_splits(squares + cell + rows, ROWS, SPLITS)
            sums = scale_and_gate(acc, acc, total, norm, eps, K, False)
            store_outputs(sums, bias, residual, out, rows, columns, M, N, out_row)
            tl.store(counters + tile, 0)
