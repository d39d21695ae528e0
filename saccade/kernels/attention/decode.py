"""Decode attention (one new token per request) of an engine's steps, by the kernels that suit its model and GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.kernels.attention.decode_triton import DecodeWorkspace, NewTokens
from saccade.kernels.attention.fp8_kv import UNSCALED
from saccade.kernels.attention.registry import DECODE, usable
from saccade.kernels.launch.device import Heads, num_sms


class DecodeAttention:
    def __init__(
        self, heads: Heads, dtype: torch.dtype, block_size: int, max_requests: int, device: torch.device,
        norm_eps: float | None = None,
    ) -> None:  # fmt: skip
        """`dtype`: of the KV cache. `norm_eps`: of decoders with norms of query and key heads."""
        self.block_size = block_size
        self.kernels = usable(DECODE, device, heads, dtype, block_size, norm_eps, largest=max_requests)
        self._norm_eps = norm_eps or 0.0
        self._programs = num_sms(device)
        self._workspace = DecodeWorkspace.allocate(
            max_requests, heads.num_heads, heads.num_kv_heads, heads.head_dim, device
        )

    def plan(self, seq_lens: Tensor, taken: int = 0) -> Callable[..., Tensor]:
        """What runs in all layers of a step. seq_lens: int32 [requests], on the device.

        `taken`: SMs that prefill has at the same time. If it has most of them, decode runs after it, on all.
        """
        requests = len(seq_lens)
        kernel = next(kernel for smallest, kernel in self.kernels if requests >= smallest)
        free = self._programs - taken
        return kernel.plan(seq_lens, free if free >= taken else self._programs)

    def __call__(
        self, new: NewTokens, keys: Tensor, values: Tensor, tables: Tensor, seq_lens: Tensor, scale: float,
        attend: Callable[..., Tensor], out: Tensor | None = None, scales: tuple[float, float] = UNSCALED,
    ) -> Tensor:  # fmt: skip
        """As `paged_decode`, but padding rows may hold anything. `attend`: of `plan`."""
        paged = (keys, values, tables, seq_lens, self.block_size, scale, self._workspace)
        return attend(new, *paged, out=out, norm_eps=self._norm_eps, scales=scales)
