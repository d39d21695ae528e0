"""RMS norm and gated activation between a decoder's GEMMs, each one pass over memory. Knows rows, not layers.

add_rms_norm: grid (T,), program t         silu_and_mul: grid (T, columns)
x        [T, hidden]  row t ─┐             gate_up [T, 2 wide]   | gate ........ | up .......... |
residual [T, hidden]  row t ─┴► sum ──►            program (t, c)      columns c       columns c
written: sum, and sum / rms(sum) * weight  written [T, wide]     | silu(gate) * up |

Split-K partials [splits, T, hidden] of x are added up here, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two

_COLUMNS = 1024  # of a program of `silu_and_mul`
_PARTIAL_COLUMNS = 128  # of a warp that adds up split-K partials


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, only: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x, or its split-K partials, and residual [T, hidden] -> their sum normed, and the sum: the next residual.

    The weight may be float32. `only`: of these rows, int32 [W], in their order.
    """
    assert x.is_contiguous() and residual.is_contiguous() and x.shape[-2:] == residual.shape
    rows, hidden = len(residual if only is None else only), residual.shape[1]
    normed = residual.new_empty(rows, hidden)
    total = residual.new_empty(rows, hidden)
    _launch_norm(x, residual, weight, only, normed, total, eps, x.numel() // residual.numel())
    return normed, total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., hidden] normed. The weight may be float32."""
    x = x.contiguous()
    normed = torch.empty_like(x)
    _launch_norm(x, None, weight, None, normed, None, eps, 1)
    return normed


def _launch_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, only: Tensor | None, normed: Tensor, total: Tensor | None,
    eps: float, parts: int,
) -> None:  # fmt: skip
    hidden = x.shape[-1]
    columns = power_of_two(hidden)
    warps = columns // (512 if residual is None or x.dim() == 2 else _PARTIAL_COLUMNS)
    pdl = supports_pdl(x)
    _norm_kernel[(normed.numel() // hidden,)](
        x, residual, weight, only, normed, total, eps, x.numel() // parts,
        HIDDEN=hidden, COLUMNS=columns, PARTS=parts, PDL=pdl, num_warps=min(max(warps, 1), 16), **pdl_options(pdl),
    )  # fmt: skip


def silu_and_mul(gate_up: Tensor, *, over_gate: bool = False) -> Tensor:
    """A merged projection [T, 2 wide], gate first -> silu(gate) * up [T, wide].

    `over_gate`: written over the gate, so the result is a view with the stride of `gate_up`.
    """
    assert gate_up.is_contiguous()
    rows, both = gate_up.shape
    wide = both // 2
    out = gate_up[:, :wide] if over_gate else gate_up.new_empty(rows, wide)
    pdl = supports_pdl(gate_up)
    _silu_kernel[(rows, triton.cdiv(wide, _COLUMNS))](
        gate_up, out, wide, out.stride(0), COLUMNS=_COLUMNS, PDL=pdl, num_warps=4, **pdl_options(pdl)
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["only"])  # a slice of a larger array
def _norm_kernel(
    x: tl.tensor, residual: tl.tensor, weight: tl.tensor, only: tl.tensor, normed: tl.tensor, total: tl.tensor,
    eps: tl.tensor, part: tl.tensor,
    HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    inside = columns < HIDDEN
    row = tl.program_id(0).to(tl.int64)
    source = row if only is None else tl.load(only + row).to(tl.int64)
    offsets, target = source * HIDDEN + columns, row * HIDDEN + columns
    kind = normed.dtype.element_ty
    by = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    pdl_release_then_wait(PDL)
    here = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        here += tl.load(x + i * part + offsets, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        before = tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
        added = (here + before).to(kind)  # the norm sees the residual as the next layer will
        tl.store(total + target, added, mask=inside)
        here = added.to(tl.float32)
    scale = tl.rsqrt(tl.sum(here * here, 0) / HIDDEN + eps)
    tl.store(normed + target, (here * scale * by).to(kind), mask=inside)


@triton.jit
def _silu_kernel(
    gate_up: tl.tensor, out: tl.tensor, wide: tl.tensor, out_row: tl.tensor,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < wide
    pdl_release_then_wait(PDL)
    gate = tl.load(gate_up + row * 2 * wide + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * wide + wide + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)
