"""Which kernel attends for one new token per request. Knows shapes and devices only.

On Hopper GPUs many requests go to a kernel that takes as long for them however unequal their contexts are; few of them,
other devices and other shapes to the plain one, whose time is that of the longest.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

import torch
from torch import Tensor

from saccade.kernels.attention.decode_schedule import TileSchedule, plan_schedule
from saccade.kernels.attention.decode_triton import DecodeWorkspace, NewTokens, paged_decode
from saccade.kernels.launch.device import Heads, is_hopper, num_sms
from saccade.kernels.launch.self_test import self_test_passes

_MIN_REQUESTS = 16  # fewer are done before shares have begun


class DecodeAttention:
    def __init__(
        self, heads: Heads, dtype: torch.dtype, block_size: int, max_requests: int, device: torch.device
    ) -> None:
        self.heads = heads
        self.block_size = block_size
        self.by_hopper = max_requests >= _MIN_REQUESTS and can_use_hopper(heads, dtype, block_size, device)
        self._programs = num_sms(device)
        self._workspace = DecodeWorkspace.allocate(max_requests, heads.queries, heads.keys, heads.dim, device)

    def plan(self, contexts: Tensor, taken: int = 0) -> TileSchedule | None:
        """Once a step, for all layers. contexts: int32 [requests], on the device.

        `taken`: multiprocessors that others have at the same time. Where they have most, we come after them.
        """
        if not self.by_hopper or len(contexts) < _MIN_REQUESTS:
            return None
        left = self._programs - taken
        return plan_schedule(contexts, self.heads.keys, left if left >= taken else self._programs)

    def __call__(
        self,
        new: NewTokens,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        contexts: Tensor,
        scale: float,
        schedule: TileSchedule | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """As `paged_decode`, but in rows of padding there may be anything."""
        if schedule is None:
            return paged_decode(new, keys, values, tables, contexts, self.block_size, scale, self._workspace, out=out)
        from saccade.kernels.attention.decode_hopper import (
            hopper_decode,  # experimental language: only where it is used
        )

        return hopper_decode(
            new, keys, values, tables, contexts, schedule, self.block_size, scale, self._workspace, out
        )


def can_use_hopper(heads: Heads, dtype: torch.dtype, block_size: int, device: torch.device) -> bool:
    """Tried once, which compiles the kernel if nobody has done so before."""
    return is_hopper(device) and _works_on_hopper(heads, dtype, block_size, device)


@lru_cache
def _works_on_hopper(heads: Heads, dtype: torch.dtype, block_size: int, device: torch.device) -> bool:
    without = "decoding attends without the Hopper kernel"
    if not self_test_passes(lambda: import_module("saccade.kernels.attention.decode_hopper"), without):
        return False
    from saccade.kernels.attention.decode_hopper import suits

    if not suits(heads.dim, heads.queries // heads.keys, dtype, block_size):
        return False
    return self_test_passes(lambda: _try_hopper(heads, dtype, block_size, device), without)


def _try_hopper(heads: Heads, dtype: torch.dtype, block_size: int, device: torch.device) -> None:
    """It must compile, agree with the plain kernel and store what that one stores."""
    from saccade.kernels.attention.decode_hopper import hopper_decode

    contexts = torch.tensor([200, 1, 64, 65, 600, 0, 0], dtype=torch.int32, device=device)
    caches, tables, new = _example(contexts, heads, dtype, block_size)
    (k, v), (own_k, own_v), scale = caches, caches.clone(), heads.dim**-0.5
    workspace = DecodeWorkspace.allocate(len(contexts), *heads, device)
    schedule = plan_schedule(contexts, heads.keys, 7)
    expected = paged_decode(new, k, v, tables, contexts, block_size, scale, workspace)
    found = hopper_decode(new, own_k, own_v, tables, contexts, schedule, block_size, scale, workspace)
    torch.testing.assert_close(found[:-2], expected[:-2], atol=0.02, rtol=0.02)  # the last are of nobody
    torch.testing.assert_close((own_k, own_v), (k, v), atol=0, rtol=0, equal_nan=True)


def _example(contexts: Tensor, heads: Heads, dtype: torch.dtype, block_size: int) -> tuple[Tensor, Tensor, NewTokens]:
    """Keys and values [2, slots, kv_heads, d], not numbers where nobody may look; block tables; the new tokens."""
    device, requests, blocks = contexts.device, len(contexts), -(-int(contexts.max()) // block_size)
    tables = torch.randperm(requests * blocks, device=device).int().view(requests, -1)
    places = torch.arange(blocks * block_size, device=device).view(1, blocks, block_size)
    caches = torch.randn(2, requests * blocks, block_size, heads.keys, heads.dim, device=device).to(dtype)
    strangers = places >= contexts.view(-1, 1, 1) - 1
    caches[:, tables.long()] = torch.where(strangers[..., None, None], float("nan"), caches[:, tables.long()])
    last = (contexts - 1).clamp(min=0)
    block = tables.gather(1, (last // block_size).long()[:, None])[:, 0]
    slots = torch.where(contexts > 0, block * block_size + last % block_size, -1).int()
    qkv = torch.randn(4, requests, heads.queries + 2 * heads.keys, heads.dim, device=device)
    cos, sin = torch.randn(2, requests, heads.dim, device=device).to(dtype)
    return caches.flatten(1, 2), tables, NewTokens(qkv, cos, sin, slots)
