"""RMS norm and gated activation between a decoder's GEMMs, each one pass over memory. Knows rows, not layers.

add_rms_norm: grid (T,), program t         silu_and_mul: grid (T, columns)
x        [T, hidden]  row t ─┐             gate_up [T, 2 wide]   | gate ........ | up .......... |
residual [T, hidden]  row t ─┴► sum ──►            program (t, c)      columns c       columns c
written: sum, and sum / rms(sum) * weight  written [T, wide]     | silu(gate) * up |

With `Added`, x is normed before it is added.

Split-K partials [splits, T, hidden] of x are added up here, always in the same order. Both can write float8 with a
scale for 128 columns of a row (`Fp8Rows`), which the next GEMM reads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, pdl_wait_then_release, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two
from saccade.kernels.ops.gate import gated
from saccade.kernels.ops.quantize_rows import LARGEST, SMALLEST_SCALE, Fp8Rows, new_fp8_rows, quantize_groups
from saccade.kernels.ops.scaled_weight import BLOCK

_COLUMNS = 1024  # of a program of `silu_and_mul`
_PARTIAL_COLUMNS = 128  # of a warp that adds up split-K partials


class Added(NamedTuple):
    """How x is added to the residual, if not as it is."""

    weight: Tensor  # of its own norm
    eps: float
    scale: float = 1.0  # of the sum


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, only: Tensor | None = None, added: Added | None = None
) -> tuple[Tensor, Tensor]:
    """x, or its split-K partials, and residual [T, hidden] -> their sum normed, and the sum: the next residual.

    Weights may be float32; of [n, hidden] each norms by itself: [n, T, hidden]. `only`: of these rows, int32 [W], in
    their order.
    """
    assert x.is_contiguous() and residual.is_contiguous() and x.shape[-2:] == residual.shape
    rows, hidden = len(residual if only is None else only), residual.shape[1]
    normed = residual.new_empty(*weight.shape[:-1], rows, hidden)
    total = residual.new_empty(rows, hidden)
    _launch_norm(x, residual, weight, only, normed, total, eps, x.numel() // residual.numel(), added=added)
    return normed, total


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, like: Tensor | None = None) -> Tensor:
    """x [..., hidden] normed; its split-K partials as rows `like` these. The weight may be float32; None: ones."""
    x = x.contiguous()
    normed = torch.empty_like(x if like is None else like)
    _launch_norm(x, None, weight, None, normed, None, eps, x.numel() // normed.numel())
    return normed


def norm_fp8(
    x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, added: Added | None = None
) -> tuple[Fp8Rows, Tensor]:
    """As `add_rms_norm`, normed in float8. Without x the residual is normed, and returned as it is."""
    assert residual.is_contiguous() and (x is None or x.is_contiguous())
    normed = new_fp8_rows(residual, BLOCK)
    if x is None:
        _launch_norm(residual, None, weight, None, normed.values, None, eps, 1, normed.scales)
        return normed, residual
    total = torch.empty_like(residual)
    parts = x.numel() // residual.numel()
    _launch_norm(x, residual, weight, None, normed.values, total, eps, parts, normed.scales, added)
    return normed, total


def _launch_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, only: Tensor | None, normed: Tensor,
    total: Tensor | None, eps: float, parts: int, scales: Tensor | None = None, added: Added | None = None,
) -> None:  # fmt: skip
    hidden = x.shape[-1]
    columns = power_of_two(hidden)
    warps = columns // (512 if residual is None or x.dim() == 2 else _PARTIAL_COLUMNS)
    pdl = supports_pdl(x)
    weights = 1 if weight is None else weight.numel() // hidden
    _norm_kernel[(normed.numel() // hidden // weights,)](
        x, residual, weight, only, normed, total, scales, eps, x.numel() // parts, *(added or (None, 0.0, 1.0)),
        HIDDEN=hidden, COLUMNS=columns, PARTS=parts, GROUP=BLOCK, LARGEST=LARGEST, SMALLEST=SMALLEST_SCALE, PDL=pdl,
        WEIGHTS=weights, num_warps=min(max(warps, 1), 16), **pdl_options(pdl),
    )  # fmt: skip


def silu_and_mul(gate_up: Tensor, *, over_gate: bool = False, gelu: bool = False) -> Tensor:
    """A merged projection [T, 2 wide], gate first -> silu(gate) * up [T, wide]; or with GELU.

    `over_gate`: written over the gate, so the result is a view with the stride of `gate_up`.
    """
    assert gate_up.is_contiguous()
    rows, both = gate_up.shape
    wide = both // 2
    out = gate_up[:, :wide] if over_gate else gate_up.new_empty(rows, wide)
    pdl = supports_pdl(gate_up)
    _silu_kernel[(rows, triton.cdiv(wide, _COLUMNS))](
        gate_up, out, wide, out.stride(0), COLUMNS=_COLUMNS, GELU=gelu, PDL=pdl, num_warps=4, **pdl_options(pdl)
    )
    return out


def silu_and_mul_fp8(gate_up: Tensor) -> Fp8Rows:
    """As `silu_and_mul`, in float8."""
    assert gate_up.is_contiguous()
    wide = gate_up.shape[1] // 2
    out = new_fp8_rows(gate_up[:, :wide], BLOCK)
    pdl = supports_pdl(gate_up)
    _silu_fp8_kernel[(len(out.values), triton.cdiv(wide, _COLUMNS))](
        gate_up, *out, wide, COLUMNS=_COLUMNS, GROUP=BLOCK, LARGEST=LARGEST, SMALLEST=SMALLEST_SCALE, PDL=pdl,
        num_warps=4, **pdl_options(pdl),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["only"])  # a slice of a larger array
def _norm_kernel(
    x: tl.tensor, residual: tl.tensor, weight: tl.tensor, only: tl.tensor, normed: tl.tensor, total: tl.tensor,
    scales: tl.tensor, eps: tl.tensor, part: tl.tensor, own: tl.tensor, own_eps: tl.tensor, sum_scale: tl.tensor,
    HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr, PDL: tl.constexpr, WEIGHTS: tl.constexpr = 1,
) -> None:  # fmt: skip
    """With `scales`, rows after the last are the last one again."""
    columns = tl.arange(0, COLUMNS)
    inside = columns < HIDDEN
    row = tl.program_id(0).to(tl.int64)
    source = row if only is None else tl.load(only + row).to(tl.int64)
    if scales is not None:
        source = tl.minimum(row, part // HIDDEN - 1)
    offsets, target = source * HIDDEN + columns, row * HIDDEN + columns
    kind = normed.dtype.element_ty if total is None else total.dtype.element_ty
    by = 1.0
    if weight is not None:
        by = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if scales is not None and residual is None:  # may be the first of a pass: dependents read its inputs early
        pdl_wait_then_release(PDL)
    else:
        pdl_release_then_wait(PDL)
    here = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        here += tl.load(x + i * part + offsets, mask=inside, other=0.0).to(tl.float32)
    if own is not None:
        here *= tl.rsqrt(tl.sum(here * here, 0) / HIDDEN + own_eps)
        here *= tl.load(own + columns, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        before = tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
        sums = ((here + before) * sum_scale).to(kind)  # the norm sees the residual as the next layer will
        tl.store(total + (target if scales is None else offsets), sums, mask=inside)
        here = sums.to(tl.float32)
    scale = tl.rsqrt(tl.sum(here * here, 0) / HIDDEN + eps)
    normed_row = here * scale * by
    if scales is None:
        tl.store(normed + target, normed_row.to(kind), mask=inside)
        for i in tl.static_range(1, WEIGHTS):
            by = tl.load(weight + i * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
            more = normed + i * tl.num_programs(0).to(tl.int64) * HIDDEN
            tl.store(more + target, (here * scale * by).to(kind), mask=inside)
    else:
        groups = tl.arange(0, COLUMNS // GROUP)
        places = scales + groups * tl.num_programs(0) + row
        grouped = tl.reshape(normed_row, [COLUMNS // GROUP, GROUP])
        scaled = quantize_groups(grouped, places, groups * GROUP < HIDDEN, LARGEST, SMALLEST)
        tl.store(normed + target, tl.reshape(scaled, [COLUMNS]).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _silu_kernel(
    gate_up: tl.tensor, out: tl.tensor, wide: tl.tensor, out_row: tl.tensor,
    COLUMNS: tl.constexpr, PDL: tl.constexpr, GELU: tl.constexpr = False,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < wide
    pdl_release_then_wait(PDL)
    gate = tl.load(gate_up + row * 2 * wide + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * wide + wide + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + columns, gated(gate, up, GELU).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _silu_fp8_kernel(
    gate_up: tl.tensor, values: tl.tensor, scales: tl.tensor, rows: tl.tensor, wide: tl.tensor,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Rows after the last are the last one again."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [groups, GROUP]
    inside = columns < wide
    source = gate_up + tl.minimum(row, rows - 1) * 2 * wide + columns
    pdl_release_then_wait(PDL)
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + wide, mask=inside, other=0.0).to(tl.float32)
    places = scales + groups * tl.num_programs(0) + row
    scaled = quantize_groups(gate * tl.sigmoid(gate) * up, places, groups * GROUP < wide, LARGEST, SMALLEST)
    tl.store(values + row * wide + columns, scaled.to(values.dtype.element_ty), mask=inside)
