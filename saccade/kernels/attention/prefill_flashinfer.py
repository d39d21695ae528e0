"""Prefill attention by FlashInfer, where it is installed: what `paged_prefill` computes.

Knows lengths, contexts and blocks, no requests. The CPU plans a step once, for all of its layers:

    windows of 5 and 3 tokens, contexts of 9 and 3, blocks of 4, capacity for 3 windows

    rows      0 5 8 8      where each window begins in the packed rows
    pages     0 3 4 4      where its blocks begin in the list of all blocks: | 7 2 5 | 9 |
    filled    1 3 0        tokens in its last block
    seq_lens  9 3 0

Buffers and launches have fixed sizes, so a CUDA graph can hold them: missing windows are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.kernels.launch.device import Heads

_UNUSED_BYTES = 1 << 20  # of workspace: its Hopper kernels split no keys, so they write nothing there


class Capacity(NamedTuple):
    """The most a step may have."""

    tokens: int
    windows: int
    blocks: int  # of all windows together


class Pages(NamedTuple):
    """See above. int32, on the CPU."""

    rows: Tensor  # [windows + 1]
    pages: Tensor  # [windows + 1]
    filled: Tensor  # [windows]
    seq_lens: Tensor  # [windows]


def lay_out(lengths: Sequence[int], seq_lens: Sequence[int], block_size: int, windows: int, *, pin: bool) -> Pages:
    """Padded to `windows`. One allocation, pinned where copies from it must not wait for the device."""
    empty = [0] * (windows - len(lengths))
    blocks = [-(-seq_len // block_size) for seq_len in seq_lens]
    filled = [seq_len - (count - 1) * block_size for seq_len, count in zip(seq_lens, blocks, strict=True)]
    rows, pages = (accumulate([*counts, *empty], initial=0) for counts in (lengths, blocks))
    metadata = [*rows, *pages, *filled, *empty, *seq_lens, *empty]
    found = torch.tensor(metadata, dtype=torch.int32, pin_memory=pin)
    return Pages(*torch.split(found, [windows + 1, windows + 1, windows, windows]))


class FlashInferPrefill:
    def __init__(
        self, heads: Heads, capacity: Capacity, block_size: int, scale: float, dtype: torch.dtype,
        device: torch.device, *, min_tokens: int = 1,  # smaller steps are left to `paged_prefill`
    ) -> None:  # fmt: skip
        self.heads = heads
        self.capacity = capacity
        self.block_size = block_size
        self.scale = scale
        self.dtype = dtype
        self.device = device
        self.min_tokens = min_tokens
        self._is_cuda = device.type == "cuda"
        self._planned: torch.cuda.Event | None = None
        whole = -(-capacity.tokens // block_size)
        self._wrapper = self._new_wrapper(max(capacity.blocks, whole))
        # The largest step comes first: it fixes how much of the wrapper's buffers later ones may use. It also compiles
        # the kernels, unless they are cached.
        self.plan([capacity.tokens], [capacity.tokens], self._zeros(whole))

    def takes(self, tokens: int, windows: int) -> bool:
        return self.min_tokens <= tokens <= self.capacity.tokens and windows <= self.capacity.windows

    def plan(self, lengths: Sequence[int], seq_lens: Sequence[int], blocks: Tensor) -> None:
        """`blocks`: int32, on the device; of all windows, as many as their contexts fill."""
        if self._planned is not None:
            self._planned.synchronize()  # the last copy may still read from the pinned memory of a plan
        pages = lay_out(lengths, seq_lens, self.block_size, self.capacity.windows, pin=self._is_cuda)
        self._wrapper.plan(
            pages.rows, pages.pages, blocks, pages.filled, *self.heads, self.block_size,
            causal=True, sm_scale=self.scale, q_data_type=self.dtype,
            seq_lens=pages.seq_lens,  # without them, it would copy from memory that is not pinned
        )  # fmt: skip
        if self._is_cuda:
            self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._planned.record()

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """[T, heads, d] as in `paged_prefill`, of the planned step; rows that no window has are undefined."""
        k, v = (cache.view(-1, self.block_size, *cache.shape[1:]) for cache in (k_cache, v_cache))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._wrapper.run(q, (k, v), out=out)
        return out

    def _new_wrapper(self, blocks: int) -> Any:
        windows = self.capacity.windows
        return import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(_UNUSED_BYTES, dtype=torch.uint8, device=self.device),
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=self._zeros(windows + 1),
            paged_kv_indptr_buf=self._zeros(windows + 1),
            paged_kv_indices_buf=self._zeros(blocks),
            paged_kv_last_page_len_buf=self._zeros(windows),
            backend="fa3",
        )

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)
