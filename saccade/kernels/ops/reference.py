"""What the small kernels compute, in plain PyTorch and with their signatures. Slow, and runs anywhere.

Those of attention are in `models.attention`: `reference_attention` and `reference_packed_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from saccade.kernels.gemm.hopper_split_k import PipelineConfig


def rotary_and_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> None:
    turned = _rotate(k, cos, sin)
    q.copy_(_rotate(q, cos, sin))
    _store_kv(turned, v, k_cache, v_cache, slots)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, only: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    total = (x.sum(0) if x.dim() == 3 else x).to(residual.dtype) + residual
    total = total if only is None else total.index_select(0, only)
    return F.rms_norm(total.float(), weight.shape, weight.float(), eps).to(total.dtype), total


def head_norm(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, heads: int, eps: float) -> None:
    kv_heads = (qkv.shape[1] - heads) // 2
    for weight, part in ((q_weight, qkv[:, :heads]), (k_weight, qkv[:, heads : heads + kv_heads])):
        part.copy_(F.rms_norm(part.float(), weight.shape, weight.float(), eps))


def split_k_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ring: PipelineConfig) -> Tensor:
    """A part for each split, some of which may have no columns."""
    columns = zip(*(matrix.float().tensor_split(ring.splits, dim=1) for matrix in (x, weight)), strict=True)
    parts = torch.stack([F.linear(some, those) for some, those in columns])
    if bias is not None:
        parts[0] += bias.float()
    return parts


def split_k_gated_linear(x: Tensor, gate_up_weight: Tensor, ring: PipelineConfig) -> Tensor:
    assert ring.splits == 1
    return silu_and_mul(F.linear(x.float(), gate_up_weight.float())).to(x.dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """Added up and activated in float32, rounded once."""
    wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return _ACTS[act](wide).to(x.dtype)


_ACTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh_gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu_and_mul": silu_and_mul,
}


def qkv_rope(x: Tensor, weight: Tensor, bias: Tensor, rotary: Tensor, heads: int) -> Tensor:
    """Added up and turned in float32, rounded once; queries and keys in parts."""
    qkv = F.linear(x.float(), weight.float(), bias.float()).view(len(x), 3, heads, -1)
    low, high = qkv[:, :2].clone().chunk(2, dim=-1)
    along, across = (rotary[:, None, None, which::2] for which in range(2))
    qkv[:, :2] = torch.cat((low * along - high * across, high * along + low * across), dim=-1)
    return qkv.flatten(1)[:, parted_columns(heads, qkv.shape[-1])].view_as(qkv).to(x.dtype)


def parted_columns(heads: int, dim: int) -> list[int]:
    """Where the columns of q, k and v that `qkv_rope` writes one after the other are in the usual order.

    Of all heads 32 pairs first, then the others; the two of a pair (i, i + d / 2) are neighbours. Values are as usual.
    """
    low = [range(first, first + dim // 2) for first in range(0, 2 * heads * dim, dim)]
    parts = [own[pairs] for whose in (low[:heads], low[heads:]) for pairs in _PARTS for own in whose]
    turned = [i + half for part in parts for i in part for half in (0, dim // 2)]
    return [*turned, *range(len(turned), 3 * heads * dim)]


_PARTS = (slice(0, 32), slice(32, None))  # pairs


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    cos, sin = (angle.float().view(len(x), 1, -1) for angle in (cos, sin))
    return (x.float() * cos + torch.cat((high, low), dim=-1) * sin).to(x.dtype)


def _store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    is_token = slots >= 0
    k_cache[slots[is_token]] = k[is_token]
    v_cache[slots[is_token]] = v[is_token]
