"""The output gate of attention, in place. Knows rows, not heads.

projection [T, q | k | v | gate]      | ........ | gate of row t |      a view: rows may be wider than the gate
out        [T, heads * d]             | out of row t * sigmoid(gate) |
grid (T, columns)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, supports_pdl

_COLUMNS = 1024  # of a program


def sigmoid_gate(out: Tensor, gate: Tensor) -> Tensor:
    """out [T, wide] * sigmoid(gate [T, wide]), written over `out`. Rows of both may be slices of wider ones."""
    assert out.shape == gate.shape and out.dim() == 2 and out.stride(1) == gate.stride(1) == 1
    rows, wide = out.shape
    pdl = supports_pdl(out)
    _gate_kernel[(rows, triton.cdiv(wide, _COLUMNS))](
        out, gate, wide, out.stride(0), gate.stride(0), COLUMNS=_COLUMNS, PDL=pdl, num_warps=4, **pdl_options(pdl)
    )
    return out


@triton.jit
def _gate_kernel(
    out: tl.tensor, gate: tl.tensor, wide: tl.tensor, out_row: tl.tensor, gate_row: tl.tensor,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < wide
    pdl_release_then_wait(PDL)
    by = tl.load(gate + row * gate_row + columns, mask=inside, other=0.0).to(tl.float32)
    mixed = tl.load(out + row * out_row + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + columns, (mixed * tl.sigmoid(by)).to(out.dtype.element_ty), mask=inside)
