"""Sum over the experts of each token: the last step of an MoE layer.

    outputs [T, slots, H]: grid (T, H / COLUMNS)     | slot 0 | slot 1 | ... |  + sigmoid(gate) * addend ->  out [T, H]

The routing weights are in `outputs` already. Slots are added in their order, in float32, and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, supports_pdl

_COLUMNS = 1024  # of a program


def combine(outputs: Tensor, slots: int, addend: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
    """outputs [pairs, H] -> [T, H]. `addend` [T, H]: of a shared expert; `gate` [T]: its gate before the sigmoid."""
    pairs, hidden = outputs.shape
    tokens = pairs // slots
    assert outputs.is_contiguous() and pairs == tokens * slots
    assert addend is None or (addend.is_contiguous() and addend.shape == (tokens, hidden))
    assert gate is None or (gate.numel() == tokens and gate.is_contiguous() and addend is not None)
    out = torch.empty((tokens, hidden), dtype=outputs.dtype, device=outputs.device)
    pdl = supports_pdl(outputs)
    _combine_kernel[(tokens, triton.cdiv(hidden, _COLUMNS))](
        outputs, addend, gate, out, hidden, SLOTS=slots, COLUMNS=_COLUMNS, PDL=pdl, num_warps=4, **pdl_options(pdl)
    )
    return out


@triton.jit
def _combine_kernel(
    outputs: tl.tensor, addend: tl.tensor, gate: tl.tensor, out: tl.tensor, hidden: tl.tensor,
    SLOTS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < hidden
    pdl_release_then_wait(PDL)
    row = outputs + token * SLOTS * hidden + columns
    total = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    for slot in tl.static_range(1, SLOTS):
        total += tl.load(row + slot * hidden, mask=mask, other=0.0).to(tl.float32)
    add_and_store(total, addend, gate, out, token, columns, hidden)


@triton.jit
def add_and_store(
    total: tl.tensor, addend: tl.tensor, gate: tl.tensor, out: tl.tensor, token: tl.tensor, columns: tl.tensor,
    N: tl.tensor,
) -> None:  # fmt: skip
    """Columns of a token's row, with those of `addend`, times its gate if there is one."""
    mask = columns < N
    if addend is not None:
        more = tl.load(addend + token * N + columns, mask=mask, other=0.0).to(tl.float32)
        if gate is not None:
            more *= tl.sigmoid(tl.load(gate + token).to(tl.float32))
        total += more
    tl.store(out + token * N + columns, total.to(out.dtype.element_ty), mask=mask)
