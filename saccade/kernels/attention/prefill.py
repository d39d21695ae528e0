"""Which kernel attends for windows of several tokens, and how large its tiles are. Knows shapes and devices only.

On Hopper GPUs most windows go to a kernel of their own; few tokens, other devices and other shapes to the plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.attention.prefill_triton import choose_rows, choose_splits, paged_prefill
from saccade.kernels.launch.device import Heads, is_hopper, num_sms
from saccade.kernels.launch.self_test import self_test_passes
from saccade.kernels.launch.tiling import Tiles

_HOPPER_ROWS, _PLAIN_ROWS = 128, 64
_MAX_PLAIN_TOKENS = 128  # fewer leave half of the Hopper kernel's rows empty
_SHORT = ((128, 448), (256, 1024), (640, 2304))  # up to so many tokens a context is short up to so many keys


class Half(NamedTuple):
    """A launch that leaves the other half of the device to others."""

    splits: int  # of the keys
    programs: int  # each has a multiprocessor to itself


class PrefillAttention:
    """A pass whose contexts are short has no splits: what they cost would be more than they gain."""

    def __init__(self, heads: int, block_size: int, device: torch.device, *, by_hopper: bool) -> None:
        self.heads = heads
        self.block_size = block_size
        self.by_hopper = by_hopper
        self._num_sms = num_sms(device)

    @classmethod
    def best(cls, heads: Heads, dtype: torch.dtype, block_size: int, device: torch.device) -> PrefillAttention:
        return cls(heads.queries, block_size, device, by_hopper=can_use_hopper(heads, dtype, block_size, device))

    def is_short(self, tokens: int, context: int) -> bool:
        """Whether a pass of so many tokens goes the short way, if no context is longer."""
        is_one_wave = tokens * self.heads <= _PLAIN_ROWS * self._num_sms
        return is_one_wave and context <= next((keys for most, keys in _SHORT if tokens <= most), 0)

    def rows(self, tokens: int, *, is_short: bool = False) -> int:
        """Of the tiles that a step of so many tokens is cut into."""
        if is_short or (self.by_hopper and tokens <= _MAX_PLAIN_TOKENS):
            return _PLAIN_ROWS
        return _HOPPER_ROWS if self.by_hopper else choose_rows(tokens, self.heads, self._num_sms)

    def half(self, tokens: int) -> Half:
        """How so many tokens attend beside others. It is more than half only where their tiles alone are."""
        rows = self.rows(tokens)
        splits = choose_splits(tokens, self.heads, rows, self._num_sms // 2)
        return Half(splits, self.heads * -(-tokens // rows) * splits)

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        contexts: Tensor,
        tiles: Tiles,
        scale: float,
        out: Tensor | None = None,
        splits: int | None = None,
    ) -> Tensor:
        """As `paged_prefill`."""
        if self.by_hopper and tiles.rows == _HOPPER_ROWS:
            from saccade.kernels.attention.prefill_hopper import (
                hopper_prefill,  # experimental language: only where it is used
            )

            return hopper_prefill(
                q, keys, values, tables, contexts, tiles, self.block_size, scale, splits=splits, out=out
            )
        return paged_prefill(q, keys, values, tables, contexts, tiles, self.block_size, scale, splits=splits, out=out)


def can_use_hopper(heads: Heads, dtype: torch.dtype, block_size: int, device: torch.device) -> bool:
    """Tried once, which compiles the kernel if nobody has done so before."""
    return is_hopper(device) and _works_on_hopper(heads, dtype, block_size, device)


@lru_cache
def _works_on_hopper(heads: Heads, dtype: torch.dtype, block_size: int, device: torch.device) -> bool:
    without = "prompts attend without the Hopper kernel"
    if not self_test_passes(lambda: import_module("saccade.kernels.attention.prefill_hopper"), without):
        return False
    from saccade.kernels.attention.prefill_hopper import suits

    return suits(heads.dim, dtype, block_size) and self_test_passes(
        lambda: _try_hopper(heads, block_size, device), without
    )


def _try_hopper(heads: Heads, block_size: int, device: torch.device) -> None:
    """It must compile and agree with the plain kernel, also where keys are split and weights outgrow its level."""
    from saccade.kernels.attention.prefill_hopper import hopper_prefill

    lengths, context, blocks = [70, 130], 2300, -(-2300 // block_size)
    contexts = torch.full((2,), context, dtype=torch.int32, device=device)
    tables = torch.randperm(2 * blocks, device=device).int().view(2, -1)
    k, v = torch.randn(2, 2 * blocks * block_size, heads.keys, heads.dim, device=device).bfloat16()
    k[tables[0, blocks // 2] * block_size] *= 60  # a key that queries prefer by hundreds of powers of two
    q = torch.randn(sum(lengths), heads.queries, heads.dim, device=device).bfloat16()

    def by(kernel: Callable[..., Tensor], rows: int, splits: int) -> Tensor:
        tiles = Tiles.of(lengths, rows, device, contexts=[context] * 2)
        return kernel(q, k, v, tables, contexts, tiles, block_size, 0.5, splits=splits)

    whole, split = (by(hopper_prefill, _HOPPER_ROWS, splits) for splits in (1, 3))
    expected = by(paged_prefill, _PLAIN_ROWS, 1)
    torch.testing.assert_close(whole, expected, atol=0.05, rtol=0.05)
    torch.testing.assert_close(split, expected, atol=0.05, rtol=0.05)
