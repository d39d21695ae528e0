"""Writes a step's new keys and values to the cache, turned by their positions on the way. Knows slots alone.

k, v [T, kv_heads, d], views of one merged projection       cache of a layer [slots, kv_heads, d]

    row 0, slot 28   ──────────────────────────────────────►  28 | head 0 ... | head 1 ... |
    row 1, slot -1   padding of a recorded launch: nothing
    row 2, slot 20   ──────────────────────────────────────►  20 | head 0 ... | head 1 ... |

Grid (T, 2): program (t, 0) turns the queries of row t where they lie, program (t, 1) turns its keys on their way to the
cache and copies its values.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.tiles import power_of_two


def rotary_and_store(
    q: Tensor,  # [T, heads, d], turned in place
    k: Tensor,  # [T, kv_heads, d], left as it is: the cache has it turned
    v: Tensor,
    cos: Tensor,  # [T, d] or [T, 1, d], contiguous
    sin: Tensor,  # the same; carries the sign of its half
    k_cache: Tensor,  # [slots, kv_heads, d], contiguous; so is v_cache
    v_cache: Tensor,
    slots: Tensor,  # int64 or int32 [T]; -1: the row's queries are turned, nothing is stored
) -> None:
    """Dimensions i and i + d / 2 turn as a pair. M-RoPE differs in cos and sin alone."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    _rotary_kernel[(tokens, 2)](
        q, k, v, cos, sin, k_cache, v_cache, slots, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PADDED_HEADS=power_of_two(heads),
        PADDED_KV_HEADS=power_of_two(kv_heads), PADDED_HALF=power_of_two(dim // 2), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["slots"])  # which lie anywhere in a larger array
def _rotary_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, cos: tl.tensor, sin: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor,
    slots: tl.tensor,
    q_row: tl.tensor, q_head: tl.tensor, k_row: tl.tensor, k_head: tl.tensor, v_row: tl.tensor, v_head: tl.tensor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr, PADDED_KV_HEADS: tl.constexpr, PADDED_HALF: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, PADDED_HALF)[None, :]
    if tl.program_id(1) == 0:
        heads = tl.arange(0, PADDED_HEADS)[:, None]
        inside = (heads < HEADS) & (half < DIM // 2)
        own = q + row * q_row + heads * q_head + half
        _turn(own, own, inside, cos + row * DIM + half, sin + row * DIM + half, DIM)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            heads = tl.arange(0, PADDED_KV_HEADS)[:, None]
            inside = (heads < KV_HEADS) & (half < DIM // 2)
            place = (slot * KV_HEADS + heads) * DIM + half
            own = k + row * k_row + heads * k_head + half
            _turn(own, k_cache + place, inside, cos + row * DIM + half, sin + row * DIM + half, DIM)
            values = v + row * v_row + heads * v_head + half
            tl.store(v_cache + place, tl.load(values, mask=inside), mask=inside)
            tl.store(v_cache + place + DIM // 2, tl.load(values + DIM // 2, mask=inside), mask=inside)


@triton.jit
def _turn(
    source: tl.tensor, target: tl.tensor, inside: tl.tensor, cos: tl.tensor, sin: tl.tensor, DIM: tl.constexpr
) -> None:
    """Pointers to the first halves [heads, d / 2]; angles are pointers too, one row for all heads."""
    has_angle = tl.arange(0, cos.shape[1])[None, :] < DIM // 2
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    cos_low, cos_high = tl.load(cos, mask=has_angle), tl.load(cos + DIM // 2, mask=has_angle)
    sin_low, sin_high = tl.load(sin, mask=has_angle), tl.load(sin + DIM // 2, mask=has_angle)
    kind = target.dtype.element_ty
    tl.store(target, (low * cos_low + high * sin_low).to(kind), mask=inside)
    tl.store(target + DIM // 2, (high * cos_high + low * sin_high).to(kind), mask=inside)
