"""Applies RoPE to a step's queries and keys, and writes its keys and values to the KV cache. Knows slots alone.

k, v [T, kv_heads, d], views of one merged projection       cache of a layer [slots, kv_heads, d]

    row 0, slot 28   ──────────────────────────────────────►  28 | head 0 ... | head 1 ... |
    row 1, slot -1   padding of a CUDA graph: nothing
    row 2, slot 20   ──────────────────────────────────────►  20 | head 0 ... | head 1 ... |

Grid (T, 2): program (t, 0) rotates the queries of row t in place, program (t, 1) writes its rotated keys and its values
to the cache.

Split-K partials [splits, T, ...] of the projection are added up here; queries are then written elsewhere.

Partial RoPE: cos and sin have fewer columns than a head, and its other dimensions do not rotate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.attention.fp8_kv import UNSCALED, as_stored, launched
from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two


def rotary_and_store(
    q: Tensor,  # [T, heads, d], rotated in place; or its partials [splits, T, heads, d], which are not changed
    k: Tensor,  # [T, kv_heads, d] or partials, not changed: only the cache has it rotated
    v: Tensor,
    cos: Tensor,  # [T, rotary_dim] or [T, 1, rotary_dim], contiguous; dimensions from rotary_dim on do not rotate
    sin: Tensor,  # the same; carries the sign of its half
    k_cache: Tensor,  # [slots, kv_heads, d], slots may be apart; v_cache is strided alike
    v_cache: Tensor,
    slots: Tensor,  # int64 or int32 [T]; -1: the row's queries are rotated, nothing is stored
    query_scales: Tensor | None = None,  # float32 [T]: factors of the queries (attention temperature)
    scales: tuple[float, float] = UNSCALED,  # of FP8 keys and values
    turn: slice | None = None,  # the columns of each half of cos and sin that these heads rotate by; None: all
) -> Tensor:
    """The rotated queries. Dimensions i and i + rotary_dim / 2 rotate as a pair.

    M-RoPE differs in cos and sin alone.
    """
    tokens, heads, dim = q.shape[-3:]
    kv_heads = k.shape[-2]
    angles = rotary = cos.shape[-1]
    assert cos.is_contiguous() and sin.is_contiguous()
    if turn is not None:
        rotary = 2 * (turn.stop - turn.start)
        cos, sin = cos[..., turn.start :], sin[..., turn.start :]
    parts = q.shape[0] if q.dim() == 4 else 1
    pdl = supports_pdl(q)
    assert k_cache.stride() == v_cache.stride() and k_cache.stride()[1:] == (dim, 1), k_cache.stride()
    assert q.stride() == k.stride() == v.stride() and q.stride(-2) == dim, "queries, keys, values of one GEMM"
    rotated = q if q.dim() == 3 else torch.empty((tokens, heads, dim), dtype=cos.dtype, device=q.device)
    _rotary_kernel[(tokens, 2)](
        q, k, v, rotated, cos, sin, k_cache, v_cache, slots, query_scales,
        *launched(scales)[:2], q.stride(-3), rotated.stride(0), q.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PADDED_HEADS=power_of_two(heads),
        PADDED_KV_HEADS=power_of_two(kv_heads), PADDED_HALF=power_of_two(rotary // 2), PARTS=parts, PDL=pdl,
        ROTARY=rotary, ANGLES=angles, SLOT=k_cache.stride(0),
        num_warps=4, **pdl_options(pdl),
    )  # fmt: skip
    return rotated


class Pairs(NamedTuple):
    """Whether neighbours are a pair, and not dimensions i and i + rotary_dim / 2; and where cos and sin have theirs."""

    are_neighbours: bool = False
    angles_are: bool = False


HALVES = Pairs()


def rotary(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, pairs: Pairs = HALVES) -> None:
    """q [T, heads, d] and k [T, kv_heads, d], if there is one, in place, where the cache is written by others.

    cos and sin [T, rotary_dim], contiguous, without a sign.
    """
    tokens, heads, dim = q.shape
    tensors = 1 if k is None else 2
    k = q if k is None else k
    kv_heads = k.shape[1]
    width = cos.shape[-1]
    pdl = supports_pdl(q)
    assert cos.is_contiguous() and sin.is_contiguous() and q.stride(2) == k.stride(2) == 1 and width <= dim
    _rotary_in_place_kernel[(tokens, tensors)](
        q, k, cos, sin, q.stride(0), q.stride(1), k.stride(0), k.stride(1), heads, kv_heads,
        PADDED_HEADS=power_of_two(max(heads, kv_heads)), PADDED_HALF=power_of_two(width // 2), ROTARY=width, PDL=pdl,
        PAIR=2 if pairs.are_neighbours else width, ANGLE=2 if pairs.angles_are else width,
        num_warps=4, **pdl_options(pdl),
    )  # fmt: skip


@triton.jit
def _rotary_in_place_kernel(
    q: tl.tensor, k: tl.tensor, cos: tl.tensor, sin: tl.tensor,
    q_row: tl.tensor, q_head: tl.tensor, k_row: tl.tensor, k_head: tl.tensor, heads: tl.tensor, kv_heads: tl.tensor,
    PADDED_HEADS: tl.constexpr, PADDED_HALF: tl.constexpr, ROTARY: tl.constexpr, PDL: tl.constexpr,
    PAIR: tl.constexpr, ANGLE: tl.constexpr,
) -> None:  # fmt: skip
    """Program (t, 0) has the queries of row t, (t, 1) its keys. Of a pair the second is PAIR / 2 after the first."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, PADDED_HEADS)[:, None]
    half = tl.arange(0, PADDED_HALF)[None, :]
    known = half < ROTARY // 2
    pdl_release_then_wait(PDL)  # first: cos and sin are a kernel's of this pass
    angle, first = half * (2 if ANGLE < ROTARY else 1), half * (2 if PAIR < ROTARY else 1)
    angles = _load_pair(cos + row * ROTARY + angle, known, ANGLE, 0, 1)
    low, high = _load_pair(sin + row * ROTARY + angle, known, ANGLE, 0, 1)
    if tl.program_id(1) == 0:
        own = q + row * q_row + head * q_head + first
        inside = (head < heads) & known
    else:
        own = k + row * k_row + head * k_head + first
        inside = (head < kv_heads) & known
    kind: tl.constexpr = q.dtype.element_ty
    _rotate(_load_pair(own, inside, PAIR, 0, 1), own, inside, angles, (-low, high), kind, 1.0, PAIR)


@triton.jit(do_not_specialize=["part"], do_not_specialize_on_alignment=["slots"])  # a slice of a larger array
def _rotary_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, rotated: tl.tensor, cos: tl.tensor, sin: tl.tensor,
    k_cache: tl.tensor, v_cache: tl.tensor, slots: tl.tensor, query_scales: tl.tensor,
    k_by: tl.tensor, v_by: tl.tensor, row_step: tl.tensor, rotated_step: tl.tensor, part: tl.tensor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr, PADDED_KV_HEADS: tl.constexpr, PADDED_HALF: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr, ROTARY: tl.constexpr, ANGLES: tl.constexpr, SLOT: tl.constexpr,
) -> None:  # fmt: skip
    """ANGLES: columns of cos and sin, of which the heads have ROTARY."""
    row = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, PADDED_HALF)[None, :]
    angles = _load_pair(cos + row * ANGLES + half, half < ROTARY // 2, ANGLES, 0, 1)
    signed = _load_pair(sin + row * ANGLES + half, half < ROTARY // 2, ANGLES, 0, 1)
    slot = tl.load(slots + row).to(tl.int64)
    pdl_release_then_wait(PDL)
    kind: tl.constexpr = rotated.dtype.element_ty
    if tl.program_id(1) == 0:
        heads = tl.arange(0, PADDED_HEADS)[:, None]
        inside = (heads < HEADS) & (half < ROTARY // 2)
        by = 1.0
        if query_scales is not None:
            by = tl.load(query_scales + row)
            angles = angles[0] * by, angles[1] * by
            signed = signed[0] * by, signed[1] * by
        pair = _load_pair(q + row * row_step + heads * DIM + half, inside, ROTARY, part, PARTS)
        _rotate(pair, rotated + row * rotated_step + heads * DIM + half, inside, angles, signed, kind, 1.0, ROTARY)
        if ROTARY < DIM and (PARTS > 1 or query_scales is not None):  # otherwise the rest is in place
            target = rotated + row * rotated_step + heads * DIM
            _copy(q + row * row_step + heads * DIM, target, heads < HEADS, by, part, kind, 1.0, ROTARY, DIM, PARTS)
    elif slot >= 0:
        heads = tl.arange(0, PADDED_KV_HEADS)[:, None]
        inside = (heads < KV_HEADS) & (half < ROTARY // 2)
        target = slot * SLOT + heads * DIM + half
        pair = _load_pair(k + row * row_step + heads * DIM + half, inside, ROTARY, part, PARTS)
        _rotate(pair, k_cache + target, inside, angles, signed, kind, k_by, ROTARY)
        if ROTARY == DIM:
            low, high = _load_pair(v + row * row_step + heads * DIM + half, inside, DIM, part, PARTS)
            tl.store(v_cache + target, as_stored(low.to(kind), v_by, v_cache.dtype.element_ty), mask=inside)
            tl.store(v_cache + target + DIM // 2, as_stored(high.to(kind), v_by, v_cache.dtype.element_ty), mask=inside)
        else:
            own, cell = row * row_step + heads * DIM, slot * SLOT + heads * DIM
            _copy(k + own, k_cache + cell, heads < KV_HEADS, 1.0, part, kind, k_by, ROTARY, DIM, PARTS)
            _copy(v + own, v_cache + cell, heads < KV_HEADS, 1.0, part, kind, v_by, 0, DIM, PARTS)


@triton.jit
def _copy(
    source: tl.tensor, target: tl.tensor, known: tl.tensor, by: tl.tensor, part: tl.tensor,
    kind: tl.constexpr, stored_by: tl.tensor, FIRST: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr,
) -> None:  # fmt: skip
    """Dimensions from FIRST on, which do not rotate, times `by`."""
    dims = FIRST + tl.arange(0, triton.next_power_of_2(DIM - FIRST))[None, :]
    inside = known & (dims < DIM)
    found = tl.load(source + dims, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        found += tl.load(source + i * part + dims, mask=inside, other=0.0)
    tl.store(target + dims, as_stored((found * by).to(kind), stored_by, target.dtype.element_ty), mask=inside)


@triton.jit
def _load_pair(low: tl.tensor, inside: tl.tensor, DIM: tl.constexpr, part: tl.tensor, PARTS: tl.constexpr) -> tl.tuple:
    """Both halves of rows in float32, summed over split-K partials; `low` points to the first halves."""
    first = tl.load(low, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(low + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        first += tl.load(low + i * part, mask=inside, other=0.0)
        second += tl.load(low + i * part + DIM // 2, mask=inside, other=0.0)
    return first, second


@triton.jit
def _rotate(
    pair: tl.tuple, target: tl.tensor, inside: tl.tensor, cos: tl.tuple, sin: tl.tuple,
    kind: tl.constexpr, by: tl.tensor, DIM: tl.constexpr,
) -> None:  # fmt: skip
    """Halves [heads, d / 2] by angles of one row for all heads; `target` points to where the first half goes.

    They are rounded to `kind`, then to what is stored there (`as_stored`).
    """
    low, high = pair
    first, second = (low * cos[0] + high * sin[0]).to(kind), (high * cos[1] + low * sin[1]).to(kind)
    tl.store(target, as_stored(first, by, target.dtype.element_ty), mask=inside)
    tl.store(target + DIM // 2, as_stored(second, by, target.dtype.element_ty), mask=inside)
