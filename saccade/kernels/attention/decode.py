"""Which kernel runs decode attention (one new token per request). Knows shapes and devices only.

On Hopper GPUs large batches take a kernel whose time depends on the sum of all contexts. Small batches, other devices
and other shapes take the Triton kernel, whose time is that of the longest context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels.attention.decode_hopper_schedule import TileSchedule, plan_schedule
from saccade.kernels.attention.decode_triton import DecodeWorkspace, NewTokens, paged_decode
from saccade.kernels.attention.fp8_kv import UNSCALED
from saccade.kernels.launch.device import Heads, is_hopper, num_sms
from saccade.kernels.launch.kernel_choice import KernelChoice, assert_agree

_MIN_REQUESTS = 16  # smaller batches are faster without a schedule


class DecodeAttention:
    def __init__(
        self, heads: Heads, dtype: torch.dtype, block_size: int, max_requests: int, device: torch.device,
        norm_eps: float | None = None,
    ) -> None:  # fmt: skip
        """`dtype`: of the KV cache. `norm_eps`: of decoders with norms of query and key heads."""
        self.heads = heads
        self.block_size = block_size
        self.by_hopper = max_requests >= _MIN_REQUESTS and can_use_hopper(heads, dtype, block_size, device, norm_eps)
        self._norm_eps = norm_eps or 0.0
        self._programs = num_sms(device)
        self._workspace = DecodeWorkspace.allocate(
            max_requests, heads.num_heads, heads.num_kv_heads, heads.head_dim, device
        )

    def plan(self, seq_lens: Tensor, taken: int = 0) -> TileSchedule | None:
        """Once per step, for all layers. seq_lens: int32 [requests], on the device.

        `taken`: SMs that prefill has at the same time. If it has most of them, decode runs after it, on all.
        """
        if not self.by_hopper or len(seq_lens) < _MIN_REQUESTS:
            return None
        left = self._programs - taken
        return plan_schedule(seq_lens, self.heads.num_kv_heads, left if left >= taken else self._programs)

    def __call__(
        self, new: NewTokens, keys: Tensor, values: Tensor, tables: Tensor, seq_lens: Tensor, scale: float,
        schedule: TileSchedule | None, out: Tensor | None = None, scales: tuple[float, float] = UNSCALED,
    ) -> Tensor:  # fmt: skip
        """As `paged_decode`, but padding rows may hold anything."""
        block_size = self.block_size
        paged = (keys, values, tables, seq_lens)
        eps = self._norm_eps
        if schedule is None:
            common = (block_size, scale, self._workspace)
            return paged_decode(new, *paged, *common, out=out, norm_eps=eps, scales=scales)
        from saccade.kernels.attention.decode_hopper import hopper_decode  # Gluon is experimental: only where used

        return hopper_decode(new, *paged, schedule, block_size, scale, self._workspace, out, eps)


def _supports(heads: Heads, dtype: torch.dtype, block_size: int, device: torch.device, norm_eps: float | None) -> bool:
    if not is_hopper(device):
        return False
    from saccade.kernels.attention.decode_hopper import suits

    return suits(heads.head_dim, heads.num_heads // heads.num_kv_heads, dtype, block_size)


def _self_test(heads: Heads, dtype: torch.dtype, block_size: int, device: torch.device, norm_eps: float | None) -> None:
    """It must compile, agree with the Triton kernel and store the same keys and values."""
    from saccade.kernels.attention.decode_hopper import hopper_decode

    seq_lens = torch.tensor([200, 1, 64, 65, 600, 0, 0], dtype=torch.int32, device=device)
    caches, tables, new = _example(seq_lens, heads, dtype, block_size)
    if norm_eps is not None:
        q_norm, k_norm = torch.randn(2, heads.head_dim, device=device).to(dtype)
        new = new._replace(q_norm=q_norm, k_norm=k_norm)
    eps = norm_eps or 0.0
    k, v = caches
    own_k, own_v = caches.clone()
    scale = heads.head_dim**-0.5
    workspace = DecodeWorkspace.allocate(len(seq_lens), *heads, device)
    schedule = plan_schedule(seq_lens, heads.num_kv_heads, 7)
    expected = paged_decode(new, k, v, tables, seq_lens, block_size, scale, workspace, norm_eps=eps)
    given = (tables, seq_lens, schedule, block_size, scale, workspace, None, eps)
    found = hopper_decode(new, own_k, own_v, *given)
    assert_agree(found[:-2], expected[:-2], 0.02)  # the last two rows are padding
    assert_agree(own_k, k, 0.05 if new.k_norm is not None else 0, equal_nan=True)  # squares are summed in another order
    assert_agree(own_v, v, 0, equal_nan=True)


can_use_hopper = KernelChoice(
    "the Hopper kernel of decode attention", _supports, _self_test, "the Triton kernel runs instead"
)


def _example(seq_lens: Tensor, heads: Heads, dtype: torch.dtype, block_size: int) -> tuple[Tensor, Tensor, NewTokens]:
    """Keys and values [2, slots, kv_heads, d], NaN where the kernel must not read; block tables; the new tokens."""
    device = seq_lens.device
    requests = len(seq_lens)
    blocks = -(-int(seq_lens.max()) // block_size)
    tables = torch.randperm(requests * blocks, device=device).int().view(requests, -1)
    positions = torch.arange(blocks * block_size, device=device).view(1, blocks, block_size)
    caches = torch.randn(2, requests * blocks, block_size, heads.num_kv_heads, heads.head_dim, device=device).to(dtype)
    unwritten = positions >= seq_lens.view(-1, 1, 1) - 1
    caches[:, tables.long()] = torch.where(unwritten[..., None, None], float("nan"), caches[:, tables.long()])
    last = (seq_lens - 1).clamp(min=0)
    block = tables.gather(1, (last // block_size).long()[:, None])[:, 0]
    slots = torch.where(seq_lens > 0, block * block_size + last % block_size, -1).int()
    qkv = torch.randn(4, requests, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim, device=device)
    cos, sin = torch.randn(2, requests, heads.head_dim, device=device).to(dtype)
    return caches.flatten(1, 2), tables, NewTokens(qkv, cos, sin, slots)
