"""MLA before attention: RoPE on queries and keys, the norm of the latent, and the write to the KV cache. Knows slots.

    projections of row t                                       written
    q_rope [heads, 64]    x0 y0 x1 y1 ..  ─ RoPE ──────────►   rotated [heads, 64]   x0 x1 .. | y0 y1 ..
    kv     latent 512     ─ RMS norm ──┐
           rope 64        ─ RoPE ──────┴───────────────────►   cache of a layer, slot of row t: | latent 512 | rope 64 |

Adjacent dimensions rotate as a pair and are moved d / 2 apart, in queries as in keys, which keeps the scores.

Grid (T, 2): program (t, 0) rotates the queries of row t, program (t, 1) writes its vector to the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two


def mla_rope_store(
    q_rope: Tensor,  # [T, heads, rope], last dimension dense
    kv: Tensor,  # [T, rank + rope], last dimension dense; not changed
    cos: Tensor,  # [T, rope] or [T, 1, rope], contiguous
    sin: Tensor,  # the same; carries the sign of its half
    norm_weight: Tensor,  # [rank]
    eps: float,
    cache: Tensor,  # [slots, 1, rank + rope], contiguous
    slots: Tensor,  # int64 or int32 [T]; -1: the row's queries are rotated, nothing is stored
    rotated: Tensor,  # [T, heads, rope], last dimension dense; may be `q_rope` itself
) -> None:
    tokens, heads, rope = q_rope.shape
    rank = norm_weight.shape[0]
    pdl = supports_pdl(kv)
    assert cache.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    assert q_rope.stride(2) == rotated.stride(2) == kv.stride(1) == 1 and kv.shape[1] == rank + rope
    _store_kernel[(tokens, 2)](
        q_rope, kv, cos, sin, norm_weight, cache, slots, rotated, eps,
        q_rope.stride(0), kv.stride(0), rotated.stride(0),
        Q_HEAD=q_rope.stride(1), ROTATED_HEAD=rotated.stride(1), HEADS=heads, RANK=rank, ROPE=rope,
        PADDED_HEADS=power_of_two(heads), PADDED_RANK=power_of_two(rank), PADDED_HALF=power_of_two(rope // 2), PDL=pdl,
        num_warps=4, **pdl_options(pdl),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["slots"])  # a slice of a larger array
def _store_kernel(
    q_rope: tl.tensor, kv: tl.tensor, cos: tl.tensor, sin: tl.tensor, norm_weight: tl.tensor, cache: tl.tensor,
    slots: tl.tensor, rotated: tl.tensor, eps: tl.tensor,
    q_row: tl.tensor, kv_row: tl.tensor, rotated_row: tl.tensor,
    Q_HEAD: tl.constexpr, ROTATED_HEAD: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    PADDED_HEADS: tl.constexpr, PADDED_RANK: tl.constexpr, PADDED_HALF: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, PADDED_HALF)[None, :]
    angles = (cos + row * ROPE + pairs, sin + row * ROPE + pairs)
    slot = tl.load(slots + row).to(tl.int64)
    pdl_release_then_wait(PDL)
    if tl.program_id(1) == 0:
        heads = tl.arange(0, PADDED_HEADS)[:, None]
        inside = (heads < HEADS) & (pairs < ROPE // 2)
        source = q_rope + row * q_row + heads * Q_HEAD + 2 * pairs
        _rotate(source, rotated + row * rotated_row + heads * ROTATED_HEAD + pairs, angles, inside, ROPE)
    elif slot >= 0:
        dims = tl.arange(0, PADDED_RANK)
        weight = tl.load(norm_weight + dims, mask=dims < RANK, other=0.0).to(tl.float32)
        latent = tl.load(kv + row * kv_row + dims, mask=dims < RANK, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
        target = cache + slot * (RANK + ROPE)
        tl.store(target + dims, (latent * factor * weight).to(cache.dtype.element_ty), mask=dims < RANK)
        inside = pairs < ROPE // 2
        _rotate(kv + row * kv_row + RANK + 2 * pairs, target + RANK + pairs, angles, inside, ROPE)


@triton.jit
def _rotate(source: tl.tensor, target: tl.tensor, angles: tl.tuple, inside: tl.tensor, ROPE: tl.constexpr) -> None:
    """`source` points to the first one of each pair, `target` to where it goes.

    The barrier: the target may be the source, and other threads may not have read their pairs yet.
    """
    cos, sin = angles
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + 1, mask=inside, other=0.0).to(tl.float32)
    low = first * _angle(cos, inside) + second * _angle(sin, inside)
    high = second * _angle(cos + ROPE // 2, inside) + first * _angle(sin + ROPE // 2, inside)
    tl.debug_barrier()
    tl.store(target, low.to(target.dtype.element_ty), mask=inside)
    tl.store(target + ROPE // 2, high.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _angle(pointers: tl.tensor, inside: tl.tensor) -> tl.tensor:
    return tl.load(pointers + tl.zeros_like(inside).to(tl.int32), mask=inside, other=0.0).to(tl.float32)
