"""Random paged KV caches, and tensors on the device under test."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.attention.decode_triton import DecodeWorkspace, NewTokens, paged_decode
from saccade.kernels.attention.prefill_triton import paged_prefill
from saccade.kernels.launch.varlen_tiles import Launch, Tiles
from saccade.models.layers.torch_attention import AttentionBatch, as_stored, reference_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter multiplies bfloat16 matrices as if their bits were integers; float16 takes the same way.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
ROUNDING = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
BLOCK = 16
SMALL = Launch(rows=16, keys=16, warps=4, stages=1)  # many tiles from few keys


def assert_close(found: Tensor, expected: Tensor) -> None:
    tolerance = ROUNDING[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


class Paged(NamedTuple):
    """A cache and requests with blocks anywhere in it. What belongs to nobody is not a number."""

    k: Tensor
    v: Tensor
    tables: Tensor  # int32
    seq_lens: list[int]
    scales: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def of(cls, seq_lens: list[int], kv_heads: int, dim: int, dtype: torch.dtype) -> Paged:
        counts = [-(-context // BLOCK) for context in seq_lens]
        blocks = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(2)).tolist()
        k, v = (torch.full((len(blocks) * BLOCK, kv_heads, dim), float("nan"), dtype=dtype) for _ in range(2))
        tables = torch.full((len(seq_lens), max(counts) + 2), blocks[-1], dtype=torch.int32)
        for i, context in enumerate(seq_lens):
            own = torch.tensor(blocks[sum(counts[:i]) : sum(counts[: i + 1])], dtype=torch.int64)
            tables[i, : counts[i]] = own
            slots = (own[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:context]
            k[slots], v[slots] = torch.randn(2, context, kv_heads, dim).to(dtype)
        return cls(k.to(DEVICE), v.to(DEVICE), tables.to(DEVICE), seq_lens)

    def in_fp8(self, scales: tuple[float, float]) -> Paged:
        """The same, rounded; values beyond what FP8 holds are the largest it has."""
        k, v = (
            as_stored(cache, scale, torch.float8_e4m3fn) for cache, scale in zip((self.k, self.v), scales, strict=True)
        )
        return self._replace(k=k, v=v, scales=scales)

    def expected(self, q: Tensor, lengths: list[int]) -> Tensor:
        """Requests without a context have no rows in q."""
        some = [i for i, context in enumerate(self.seq_lens) if context]
        batch = AttentionBatch(
            [lengths[i] for i in some], [self.seq_lens[i] for i in some], self.tables[some].long(), ints([]), BLOCK
        )
        k, v = self.k, self.v
        if self.scales != (1.0, 1.0):
            k, v = k.float() * self.scales[0], v.float() * self.scales[1]
        return reference_attention(q, k, v, batch, scale=0.2)

    def new_tokens(self, q: Tensor) -> NewTokens:
        """The latest token of each request, as if not stored yet: its slot forgets it. No angle turns it."""
        k, v = (torch.zeros(len(q), *cache.shape[1:], dtype=q.dtype, device=DEVICE) for cache in (self.k, self.v))
        slots = [self.slot(i) for i in range(len(q))]
        for i, slot in enumerate(slots):
            if slot >= 0:
                k[i], v[i] = self.k[slot].to(q.dtype) * self.scales[0], self.v[slot].to(q.dtype) * self.scales[1]
                for cache in (self.k, self.v):
                    cache[slot] = torch.full_like(cache[slot], float("nan"), dtype=q.dtype).to(cache.dtype)
        cos, sin = torch.ones(len(q), q.shape[2]), torch.zeros(len(q), q.shape[2])
        return NewTokens(torch.cat((q, k, v), dim=1), cos.to(q), sin.to(q), ints(slots))

    def slot(self, request: int) -> int:
        """Of a request's latest token; -1 without one."""
        block, offset = divmod(self.seq_lens[request] - 1, BLOCK)
        return int(self.tables[request, block]) * BLOCK + offset if block >= 0 else -1

    def decode(self, q: Tensor, splits: int | None = None, launch: Launch | None = SMALL) -> Tensor:
        workspace = DecodeWorkspace.allocate(len(q), q.shape[1], self.k.shape[1], q.shape[2], DEVICE)
        if splits is not None:
            rows = q.shape[0] * q.shape[1] * splits
            workspace = DecodeWorkspace(
                torch.full((rows * q.shape[2],), float("nan"), device=DEVICE),
                torch.full((rows,), float("nan"), device=DEVICE),
                torch.full((rows,), float("nan"), device=DEVICE),
                workspace.counters,
            )
        new, seq_lens = self.new_tokens(q), ints(self.seq_lens)
        out = paged_decode(
            new, self.k, self.v, self.tables, seq_lens, BLOCK, 0.2, workspace,
            splits=splits, launch=launch, scales=self.scales,
        )  # fmt: skip
        assert not workspace.counters.any(), "a launch leaves the counters at zero for the next one"
        return out

    def prefill(
        self,
        q: Tensor,
        lengths: list[int],
        rows: int = 16,
        launch: Launch | None = SMALL,
        splits: int | None = 1,
        share: int = 16,  # keys of a split at least
    ) -> Tensor:
        tiles, seq_lens = Tiles.of(lengths, rows, DEVICE, seq_lens=self.seq_lens), ints(self.seq_lens)
        return paged_prefill(
            q, self.k, self.v, self.tables, seq_lens, tiles, BLOCK, 0.2,
            splits=splits, min_share=share, launch=launch, scales=self.scales,
        )  # fmt: skip
