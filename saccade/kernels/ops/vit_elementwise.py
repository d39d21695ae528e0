"""The steps between the GEMMs of a vision block, each one pass over memory. Knows rows and heads, no tower.

norm_then_add: grid (T,)                                 rotate_half: grid (T,)

    x [T, hidden]  row t ──► normed, a new tensor        qkv [T, 3, heads, d]   row t  | q heads | k heads | v heads |
          │                                              rotated in place                ^^^^^^^^^^^^^^^^^^^
          └──► x + bias, written in place:               dimensions i and i + d / 2 of a head are a pair
               the next GEMM adds to it
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.launch_cache import launch
from saccade.kernels.launch.pdl import pdl_options, pdl_wait_then_release, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two

_BLOCK = 4096


def norm_then_add(x: Tensor, weight: Tensor, bias: Tensor, eps: float, addend: Tensor) -> Tensor:
    """The LayerNorm of x [T, hidden]; x itself becomes x + addend [hidden]."""
    return _launch_norm(_norm_kernel, x, (weight, bias, addend), eps)


def rms_norm_and_add(x: Tensor, weight: Tensor, eps: float, addend: Tensor) -> Tensor:
    """The RMS norm of x [T, hidden]; x itself becomes x + addend [hidden]."""
    return _launch_norm(_rms_norm_kernel, x, (weight, addend), eps)


def _launch_norm(kernel: Any, x: Tensor, vectors: tuple[Tensor, ...], eps: float) -> Tensor:
    """With one warp per row if possible: reductions across warps take longer than the row."""
    assert x.is_contiguous()
    rows, hidden = x.shape
    normed = torch.empty_like(x)
    columns = power_of_two(hidden)
    warps = min(max(columns // 2048, 1), 8)
    pdl = supports_pdl(x)
    launch(
        kernel, (rows, 1, 1), (x, *vectors, normed, eps), (hidden, columns, pdl), num_warps=warps, **pdl_options(pdl)
    )
    return normed


def rotate_half(qkv: Tensor, rotary: Tensor) -> None:
    """RoPE of queries and keys [T, 3, heads, d] in place, in float32. rotary [T, d]: cosine and sine of each pair."""
    assert qkv.is_contiguous() and rotary.is_contiguous()
    rows, _, heads, dim = qkv.shape
    pdl = supports_pdl(qkv)
    sizes = (heads, dim, power_of_two(2 * heads), power_of_two(dim // 2), pdl)
    launch(_rotate_kernel, (rows, 1, 1), (qkv, rotary), sizes, num_warps=4, **pdl_options(pdl))


def write_cos_sin(cells: Tensor, per_axis: Tensor, rotary: Tensor) -> None:
    """Write the cosines and sines [T, d] that `rotate_half` takes, of patches in these cells, row and column.

    cells int32 [T], the row in the lower half; per_axis: frequencies of both axes [d / 4], or of each [2, d / 4].
    """
    assert per_axis.is_contiguous() and rotary.is_contiguous()
    quarter = per_axis.shape[-1]
    assert rotary.shape == (len(cells), 4 * quarter)
    sizes = (quarter, power_of_two(quarter), quarter if per_axis.dim() > 1 else 0)
    launch(_cos_sin_kernel, (len(cells), 1, 1), (cells, per_axis, rotary), sizes, num_warps=1)


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), in place."""
    assert x.is_contiguous()
    _quick_gelu_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, x.numel(), BLOCK=_BLOCK, num_warps=8)
    return x


@triton.jit
def _norm_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, addend: tl.tensor, normed: tl.tensor, eps: tl.tensor,
    HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    inside = columns < HIDDEN
    offsets = tl.program_id(0).to(tl.int64) * HIDDEN + columns
    kind = normed.dtype.element_ty
    pdl_wait_then_release(PDL)
    here = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, here - tl.sum(here, 0) / HIDDEN, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / HIDDEN + eps)
    by = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    to = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + offsets, (centred * scale * by + to).to(kind), mask=inside)
    more = tl.load(addend + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + offsets, (here + more).to(kind), mask=inside)


@triton.jit
def _rotate_kernel(
    qkv: tl.tensor, rotary: tl.tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_HEADS: tl.constexpr, PADDED_HALF: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, PADDED_HEADS)[:, None]  # those of the keys follow those of the queries
    half = tl.arange(0, PADDED_HALF)[None, :]
    has_angle = half < DIM // 2
    inside = (heads < 2 * HEADS) & has_angle
    places = qkv + row * (3 * HEADS * DIM) + heads * DIM + half
    pdl_wait_then_release(PDL)
    low = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(places + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(rotary + row * DIM + 2 * half, mask=has_angle)
    sin = tl.load(rotary + row * DIM + 2 * half + 1, mask=has_angle)
    kind = qkv.dtype.element_ty
    tl.store(places, (low * cos - high * sin).to(kind), mask=inside)
    tl.store(places + DIM // 2, (high * cos + low * sin).to(kind), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["cells"])  # a slice of a larger array
def _cos_sin_kernel(
    cells: tl.tensor, per_axis: tl.tensor, rotary: tl.tensor,
    QUARTER: tl.constexpr, PADDED: tl.constexpr, NEXT_AXIS: tl.constexpr,
) -> None:  # fmt: skip
    patch = tl.program_id(0)
    cell = tl.load(cells + patch)
    pair = tl.arange(0, PADDED)
    inside = pair < QUARTER
    for axis in tl.static_range(2):
        coordinate = (cell >> (16 * axis)) & 0x7FFF
        angle = coordinate.to(tl.float32) * tl.load(per_axis + axis * NEXT_AXIS + pair, mask=inside, other=0.0)
        places = rotary + patch * (4 * QUARTER) + 2 * (axis * QUARTER + pair)
        tl.store(places, tl.cos(angle), mask=inside)
        tl.store(places + 1, tl.sin(angle), mask=inside)


@triton.jit
def _quick_gelu_kernel(x: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < count, other=0.0).to(tl.float32)
    tl.store(x + offsets, (value * tl.sigmoid(1.702 * value)).to(x.dtype.element_ty), mask=offsets < count)


def silu_and_mul(x: Tensor) -> Tensor:
    """[T, gate | up] -> silu(gate) * up [T, half], written over the gate: a view with the stride of x."""
    assert x.is_contiguous()
    rows, both = x.shape
    _silu_and_mul_kernel[(rows, triton.cdiv(both // 2, _GATED_BLOCK))](
        x, HALF=both // 2, BLOCK=_GATED_BLOCK, num_warps=4
    )
    return x[:, : both // 2]


_GATED_BLOCK = 1024


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor, weight: tl.tensor, addend: tl.tensor, normed: tl.tensor, eps: tl.tensor,
    HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    inside = columns < HIDDEN
    offsets = tl.program_id(0).to(tl.int64) * HIDDEN + columns
    kind = normed.dtype.element_ty
    pdl_wait_then_release(PDL)
    here = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(here * here, 0) / HIDDEN + eps)
    by = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + offsets, (here * scale * by).to(kind), mask=inside)
    more = tl.load(addend + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + offsets, (here + more).to(kind), mask=inside)


@triton.jit
def _silu_and_mul_kernel(x: tl.tensor, HALF: tl.constexpr, BLOCK: tl.constexpr) -> None:
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HALF
    gates = x + tl.program_id(0).to(tl.int64) * (2 * HALF) + columns
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(gates, (gate * tl.sigmoid(gate) * up).to(x.dtype.element_ty), mask=inside)


def tanh_gelu(x: Tensor) -> Tensor:
    """GELU by its tanh formula, in place."""
    assert x.is_contiguous()
    _tanh_gelu_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, x.numel(), BLOCK=_BLOCK, num_warps=8)
    return x


@triton.jit
def _tanh_gelu_kernel(x: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < count, other=0.0).to(tl.float32)
    # (1 + tanh(u)) / 2 is sigmoid(2 u); here u = sqrt(2 / pi) * (value + 0.044715 * value**3).
    inner = 1.5957691216057308 * value * (1.0 + 0.044715 * value * value)
    tl.store(x + offsets, (value * tl.sigmoid(inner)).to(x.dtype.element_ty), mask=offsets < count)
