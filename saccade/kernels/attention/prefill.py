"""Prefill attention (windows of several tokens) of an engine's steps: its kernels, and their tile sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.attention.fp8_kv import UNSCALED
from saccade.kernels.attention.prefill_triton import choose_splits
from saccade.kernels.attention.registry import PREFILL, usable
from saccade.kernels.launch.device import Heads, num_sms
from saccade.kernels.launch.varlen_tiles import Tiles

_SMALL_ROWS = 64  # tiles of the Triton kernel beside a faster one, by which it is known, and of short contexts
_SHORT = ((128, 448), (256, 1024), (640, 2304))  # (tokens, keys): up to so many tokens, this many keys are short


class Half(NamedTuple):
    """A launch that leaves the other half of the device to decode."""

    splits: int  # of the keys
    programs: int  # one per SM


class PrefillAttention:
    """Short contexts are not split: combining would cost more than it gains."""

    def __init__(self, heads: Heads, dtype: torch.dtype, block_size: int, device: torch.device) -> None:
        """`dtype`: of the KV cache."""
        self.heads = heads.num_heads
        self.block_size = block_size
        self.kernels = usable(PREFILL, device, heads, dtype, block_size)
        self._num_sms = num_sms(device)

    def is_short(self, tokens: int, seq_lens: Sequence[int]) -> bool:
        """Whether a pass of so many tokens with these contexts runs without splits."""
        is_one_wave = tokens * self.heads <= _SMALL_ROWS * self._num_sms
        return is_one_wave and max(seq_lens) <= next((keys for limit, keys in _SHORT if tokens <= limit), 0)

    def rows(self, tokens: int, *, is_short: bool = False) -> int:
        """Rows of the tiles of a step of so many tokens."""
        smallest, kernel = self.kernels[0]
        if is_short or tokens < smallest:
            return _SMALL_ROWS
        return kernel.rows(tokens)

    def half(self, tokens: int) -> Half:
        """The launch of so many tokens in a mixed batch. More than half of the device only if one split needs it."""
        rows = self.rows(tokens)
        splits = choose_splits(tokens, self.heads, rows, self._num_sms // 2)
        return Half(splits, self.heads * -(-tokens // rows) * splits)

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, seq_lens: Tensor, tiles: Tiles, scale: float,
        out: Tensor | None = None, splits: int | None = None, scales: tuple[float, float] = UNSCALED,
    ) -> Tensor:  # fmt: skip
        """As `paged_prefill`."""
        _, kernel = self.kernels[-1 if tiles.rows == _SMALL_ROWS else 0]
        paged = (keys, values, tables, seq_lens, tiles, self.block_size, scale)
        return kernel.attend(q, *paged, splits=splits, out=out, scales=scales)
