"""Which kernel runs prefill attention (windows of several tokens), and its tile sizes. Knows shapes and devices only.

On Hopper GPUs most windows take a kernel of their own; few tokens, other devices and other shapes take the Triton one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.attention.fp8_kv import UNSCALED
from saccade.kernels.attention.prefill_triton import choose_rows, choose_splits, paged_prefill
from saccade.kernels.launch.device import Heads, is_hopper, num_sms
from saccade.kernels.launch.kernel_choice import KernelChoice, assert_agree
from saccade.kernels.launch.varlen_tiles import Tiles

_HOPPER_ROWS = 128
_TRITON_ROWS = 64
_MAX_TRITON_TOKENS = 128  # fewer leave half of the Hopper kernel's rows empty
_SHORT = ((128, 448), (256, 1024), (640, 2304))  # (tokens, keys): up to so many tokens, this many keys are short


class Half(NamedTuple):
    """A launch that leaves the other half of the device to decode."""

    splits: int  # of the keys
    programs: int  # one per SM


class PrefillAttention:
    """Short contexts are not split: combining would cost more than it gains."""

    def __init__(
        self, heads: int, block_size: int, device: torch.device, *, by_hopper: bool, head_dim: int = 128
    ) -> None:
        self.heads = heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.by_hopper = by_hopper
        self._num_sms = num_sms(device)

    @classmethod
    def best(cls, heads: Heads, dtype: torch.dtype, block_size: int, device: torch.device) -> PrefillAttention:
        by_hopper = can_use_hopper(heads, dtype, block_size, device)
        return cls(heads.num_heads, block_size, device, by_hopper=by_hopper, head_dim=heads.head_dim)

    def is_short(self, tokens: int, seq_lens: Sequence[int]) -> bool:
        """Whether a pass of so many tokens with these contexts runs without splits."""
        is_one_wave = tokens * self.heads <= _TRITON_ROWS * self._num_sms
        return is_one_wave and max(seq_lens) <= next((keys for limit, keys in _SHORT if tokens <= limit), 0)

    def rows(self, tokens: int, *, is_short: bool = False) -> int:
        """Of the tiles of a step of so many tokens."""
        if is_short or (self.by_hopper and tokens <= _MAX_TRITON_TOKENS):
            return _TRITON_ROWS
        if self.by_hopper:
            return _HOPPER_ROWS
        return choose_rows(tokens, self.heads, self._num_sms, self.head_dim)

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
        kernel: Callable[..., Tensor] = partial(paged_prefill, scales=scales)
        if self.by_hopper and tiles.rows == _HOPPER_ROWS:
            from saccade.kernels.attention import prefill_hopper  # Gluon is experimental: only where used

            kernel = prefill_hopper.hopper_prefill
        return kernel(q, keys, values, tables, seq_lens, tiles, self.block_size, scale, splits=splits, out=out)


def _supports(heads: Heads, dtype: torch.dtype, block_size: int, device: torch.device) -> bool:
    if not is_hopper(device):
        return False
    from saccade.kernels.attention.prefill_hopper import suits

    return suits(heads.head_dim, dtype, block_size)


def _self_test(heads: Heads, dtype: torch.dtype, block_size: int, device: torch.device) -> None:
    """It must compile and agree with the Triton kernel, also with splits and where weights overflow."""
    from saccade.kernels.attention.prefill_hopper import hopper_prefill

    lengths = [70, 130]
    seq_len = 2300
    blocks = -(-seq_len // block_size)
    seq_lens = torch.full((2,), seq_len, dtype=torch.int32, device=device)
    tables = torch.randperm(2 * blocks, device=device).int().view(2, -1)
    k, v = torch.randn(2, 2 * blocks * block_size, heads.num_kv_heads, heads.head_dim, device=device).to(dtype)
    k[tables[0, blocks // 2] * block_size] *= 60  # a key with scores larger by hundreds of powers of two
    q = torch.randn(sum(lengths), heads.num_heads, heads.head_dim, device=device).to(dtype)

    def run(kernel: Callable[..., Tensor], rows: int, splits: int) -> Tensor:
        tiles = Tiles.of(lengths, rows, device, seq_lens=[seq_len] * 2)
        return kernel(q, k, v, tables, seq_lens, tiles, block_size, 0.5, splits=splits)

    expected = run(paged_prefill, _TRITON_ROWS, 1)
    for splits in (1, 3):
        assert_agree(run(hopper_prefill, _HOPPER_ROWS, splits), expected, 0.05)


can_use_hopper = KernelChoice(
    "the Hopper kernel of prefill attention", _supports, _self_test, "the Triton kernel runs instead"
)
