"""One row by a float8 weight with scales: the kernel of `skinny` for it."""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.kernels.gemm.skinny_parts import scale_and_gate, scale_rows, store_outputs
from saccade.kernels.launch.pdl import pdl_wait_then_release
from saccade.kernels.ops.load_columns import load_columns


@triton.jit
def scaled_vector_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, bias: tl.tensor, residual: tl.tensor, norm: tl.tensor,
    out: tl.tensor, eps: tl.tensor, N: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """As `skinny._vector_kernel`. Columns are in groups of 128, so that a thread reads a scale once."""
    GROUPS: tl.constexpr = INPUTS // 128
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    weight_rows = weight + tl.minimum(columns, N - 1)[:, None, None].to(tl.int64) * K  # [OUTPUTS, 1, 1]
    to_up = tl.cast(N, tl.int64) * K  # from a row of the gate to its row of `up`
    groups = tl.arange(0, GROUPS)[None, :, None]
    inside = groups * 128 + tl.arange(0, 128)[None, None, :]  # [1, GROUPS, 128]
    blocks = scales
    if BLOCK > 0:
        blocks = scales + tl.program_id(0) * OUTPUTS // BLOCK * (K // BLOCK)
    pdl_wait_then_release(PDL)
    acc = tl.zeros([OUTPUTS, GROUPS, 128], tl.float32)
    acc_up = tl.zeros([OUTPUTS, GROUPS, 128], tl.float32)
    squares = tl.zeros([1, GROUPS, 128], tl.float32)
    MASKED: tl.constexpr = K % INPUTS != 0
    for first in tl.range(0, K, INPUTS, num_stages=STAGES):
        here = load_columns(x + first, inside, K - first, MASKED, "").to(tl.float32)  # [1, GROUPS, 128]
        if norm is not None:
            squares += here * here
            here *= load_columns(norm + first, inside, K - first, MASKED, "").to(tl.float32)
        scaled = here
        if BLOCK > 0:
            scaled = here * load_columns(blocks + first // 128, groups, (K - first) // 128, MASKED, "")
        acc += load_columns(weight_rows + first, inside, K - first, MASKED, "evict_first").to(tl.float32) * scaled
        if GATED:
            if BLOCK > 0:
                of_up = blocks + N // BLOCK * (K // BLOCK) + first // 128
                scaled = here * load_columns(of_up, groups, (K - first) // 128, MASKED, "")
            acc_up += (
                load_columns(weight_rows + to_up + first, inside, K - first, MASKED, "evict_first").to(tl.float32)
                * scaled
            )
    total = tl.sum(tl.sum(squares, 2), 1)  # [1]
    gate, up = tl.sum(tl.sum(acc, 2), 1)[:, None], tl.sum(tl.sum(acc_up, 2), 1)[:, None]
    gate, up = scale_rows(gate, up, scales, columns, N, BLOCK, GATED)
    gate = scale_and_gate(gate, up, total, norm, eps, K, GATED)
    store_outputs(gate, bias, residual, out, tl.arange(0, 1), columns, 1, N, N)
