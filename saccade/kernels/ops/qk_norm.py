"""RMS norms of query and key heads, in place, for decoders that have them. Knows heads, not layers.

qkv [T, heads + 2 kv_heads, d]    | q q q q q q q q | k k | v v |  ..   rows may be wider
grid (T, groups of heads)         |  q_weight       | k_w | not changed
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two

_HEADS = 8  # of a program: few enough that a decode step of one token runs on more than one SM


def qk_rms_norm(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, heads: int, eps: float, *, has_v: bool = False
) -> None:
    """Each head divided by its root mean square and multiplied by its kind's weight [d], or ones.

    `has_v`: values are divided, too.
    """
    rows, both, dim = qkv.shape
    assert qkv.stride()[1:] == (dim, 1) and qkv.stride(0) % dim == 0, f"strides {qkv.stride()} of heads of {dim}"
    keys = (both + heads) // 2  # heads + kv_heads
    normed = both if has_v else keys
    pdl = supports_pdl(qkv)
    _head_norm_kernel[(rows, triton.cdiv(normed, _HEADS))](
        qkv, q_weight, k_weight, heads, keys, normed, qkv.stride(0) // dim, eps,
        DIM=dim, COLUMNS=power_of_two(dim), HEADS=_HEADS, PDL=pdl, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip


@triton.jit
def _head_norm_kernel(
    qkv: tl.tensor, q_weight: tl.tensor, k_weight: tl.tensor,
    heads: tl.tensor, keys: tl.tensor, normed: tl.tensor, row: tl.tensor, eps: tl.tensor,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, COLUMNS)
    valid = column < DIM
    by = 1.0
    if q_weight is not None:
        of_q = tl.load(q_weight + column, mask=valid, other=0.0).to(tl.float32)
        of_k = tl.load(k_weight + column, mask=valid, other=0.0).to(tl.float32)
        by = tl.where((head < heads)[:, None], of_q[None, :], of_k[None, :])
        by = tl.where((head < keys)[:, None], by, 1.0)
    inside = (head < normed)[:, None] & valid[None, :]
    offsets = (tl.program_id(0).to(tl.int64) * row + head[:, None]) * DIM + column[None, :]
    pdl_release_then_wait(PDL)
    x = tl.load(qkv + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    tl.store(qkv + offsets, (x * scale * by).to(qkv.dtype.element_ty), mask=inside)
