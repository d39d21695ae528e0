"""References of GEMM and elementwise kernels in PyTorch, with the same signatures. Slow, and run anywhere.

Those of attention are in `models.layers.attention`: `reference_attention` and `reference_packed_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.ops.unpack_int4 import unpack_without_kernel

if TYPE_CHECKING:
    from saccade.kernels.gemm.hopper_split_k import PipelineConfig
    from saccade.kernels.gemm.int4_linear import Int4Weight
    from saccade.kernels.ops.norm import Added
    from saccade.kernels.ops.quantize_rows import Fp8Rows


def rotary_and_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    query_scales: Tensor | None = None,
) -> None:  # fmt: skip
    rotated = _rotate(k, cos, sin)
    scale = 1 if query_scales is None else query_scales[:, None, None]
    q.copy_(_rotate(q.float(), cos, sin) * scale)
    _store_kv(rotated, v, k_cache, v_cache, slots)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, only: Tensor | None = None, added: Added | None = None
) -> tuple[Tensor, Tensor]:
    x = x.sum(0) if x.dim() == 3 else x
    if added is not None:
        x = F.rms_norm(x.float(), x.shape[-1:], added.weight.float(), added.eps)
    total = x.to(residual.dtype) + residual
    total = total if added is None else total * added.scale
    total = total if only is None else total.index_select(0, only)
    normed = F.rms_norm(total.float(), total.shape[-1:], None, eps)
    return (normed * weight.float().unsqueeze(-2)).to(total.dtype), total


def qk_rms_norm(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, heads: int, eps: float, *, has_v: bool = False
) -> None:
    kv_heads = (qkv.shape[1] - heads) // 2
    weights = [q_weight.float(), k_weight.float(), *[torch.ones_like(k_weight, dtype=torch.float32)] * has_v]
    for weight, part in zip(weights, torch.split(qkv, [heads, kv_heads, kv_heads], dim=1), strict=False):
        part.copy_(F.rms_norm(part.float(), weight.shape, weight, eps))


def split_k_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: PipelineConfig, scales: Tensor | None = None
) -> Tensor:
    """One partial for each split, some of which may have no columns."""
    xs = x.float().tensor_split(config.splits, dim=1)
    weights = scaled_weight(weight, scales).tensor_split(config.splits, dim=1)
    partials = torch.stack([F.linear(*columns) for columns in zip(xs, weights, strict=True)])
    if bias is not None:
        partials[0] += bias.float()
    return partials


def split_k_gated_linear(
    x: Tensor, gate_up_weight: Tensor, config: PipelineConfig, scales: Tensor | None = None, *, gelu: bool = False
) -> Tensor:
    assert config.splits == 1
    wide = F.linear(x.float(), scaled_weight(gate_up_weight, scales))
    return (gelu_and_mul(wide) if gelu else silu_and_mul(wide)).to(x.dtype)


def fp8_split_k_linear(
    x: Fp8Rows, weight: Tensor, scales: Tensor, bias: Tensor | None, config: PipelineConfig
) -> Tensor:
    return split_k_linear(dequantized_rows(x), weight, bias, config, scales)


def fp8_linear_into(x: Fp8Rows, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    rows = F.linear(dequantized_rows(x), scaled_weight(weight, scales))
    return out.copy_(rows if bias is None else rows + bias.float())


def fp8_split_k_gated_linear(x: Fp8Rows, gate_up_weight: Tensor, scales: Tensor, config: PipelineConfig) -> Fp8Rows:
    """With a scale for 64 columns."""
    gated = split_k_gated_linear(dequantized_rows(x), gate_up_weight, config, scales)
    groups = gated.view(len(gated), -1, 64)
    of_groups = (groups.abs().amax(-1) / 448).clamp(min=1e-10)
    values = (groups / of_groups[..., None]).to(x.values.dtype).flatten(1)
    return x._replace(values=values, scales=of_groups.T.contiguous())


def int4_split_k_linear(x: Tensor, packed: Int4Weight, bias: Tensor | None, config: PipelineConfig) -> Tensor:
    return split_k_linear(x, unpacked_int4(packed), bias, config)


def int4_linear_into(x: Tensor, packed: Int4Weight, bias: Tensor | None, out: Tensor) -> Tensor:
    rows = F.linear(x.float(), unpacked_int4(packed))
    return out.copy_(rows if bias is None else rows + bias.float())


def int4_split_k_gated_linear(x: Tensor, packed: Int4Weight, config: PipelineConfig) -> Tensor:
    return split_k_gated_linear(x, unpacked_int4(packed), config)


def unpacked_int4(packed: Int4Weight) -> Tensor:
    """In float32: [N, K]."""
    wide = torch.empty(len(packed.weight), packed.inputs, device=packed.weight.device)
    return unpack_without_kernel(*packed, wide)


def dequantized_rows(x: Fp8Rows) -> Tensor:
    """In float32: [M, K]."""
    return (x.values.float() * x.scales.T.repeat_interleave(x.group, 1))[: x.rows]


def scaled_weight(weight: Tensor, scales: Tensor | None) -> Tensor:
    """In float32. Scales are for blocks, or for rows."""
    if scales is None:
        return weight.float()
    rows, columns = (size // count for size, count in zip(weight.shape, scales.shape, strict=True))
    return weight.float() * scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def sigmoid_gate(out: Tensor, gate: Tensor) -> Tensor:
    return out.copy_(out.float() * torch.sigmoid(gate.float()))


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """Computed in float32, rounded once."""
    wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return _ACTS[act](wide).to(x.dtype)


_ACTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh_gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu_and_mul": silu_and_mul,
    "gelu_and_mul": gelu_and_mul,
}


def qkv_rope(x: Tensor, weight: Tensor, bias: Tensor, rotary: Tensor, heads: int) -> Tensor:
    """Computed in float32, rounded once; columns of queries and keys in the order of `parted_columns`."""
    qkv = F.linear(x.float(), weight.float(), bias.float()).view(len(x), 3, heads, -1)
    low, high = qkv[:, :2].clone().chunk(2, dim=-1)
    cos = rotary[:, None, None, ::2]
    sin = rotary[:, None, None, 1::2]
    qkv[:, :2] = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    return qkv.flatten(1)[:, parted_columns(heads, qkv.shape[-1])].view_as(qkv).to(x.dtype)


def parted_columns(heads: int, dim: int) -> list[int]:
    """The usual column of q, k and v for each column that `qkv_rope` writes.

    Of all heads 32 pairs first, then the others; the two of a pair (i, i + d / 2) are neighbours. Values are as usual.
    """
    columns: list[int] = []
    for first in (0, heads * dim):  # of queries, of keys
        for pairs in (range(min(32, dim // 2)), range(32, dim // 2)):
            for head in range(heads):
                for pair in pairs:
                    low = first + head * dim + pair
                    columns += [low, low + dim // 2]
    return [*columns, *range(len(columns), 3 * heads * dim)]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Dimensions that cos and sin have no columns for stay."""
    rotary = cos.shape[-1]
    turning = x[..., :rotary].float()
    low, high = turning.chunk(2, dim=-1)
    cos, sin = (angle.float().view(len(x), 1, -1) for angle in (cos, sin))
    rotated = turning * cos + torch.cat((high, low), dim=-1) * sin
    return torch.cat((rotated.to(x.dtype), x[..., rotary:]), dim=-1)


def _store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    is_token = slots >= 0
    k_cache[slots[is_token]] = k[is_token]
    v_cache[slots[is_token]] = v[is_token]
