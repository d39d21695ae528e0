"""The Hopper kernel for prompts beside the plain one: is it right, also where weights outgrow its level, and how fast?

python -m benchmarks.prefill_hopper        (needs a GPU of compute capability 9.0)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.attention.prefill_hopper import ROWS, hopper_prefill
from saccade.kernels.attention.prefill_triton import choose_rows, paged_prefill
from saccade.kernels.launch.device import num_sms
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.models.layers.torch_attention import AttentionBatch, reference_attention

CUDA, BLOCK, DIM, SCALE = torch.device("cuda"), 16, 128, 128**-0.5
HEADS, KV_HEADS = 12, 2
LAYERS, LAUNCHES, ROUNDS = 4, 8, 9
SIZES = [(512, 0), (1216, 0), (1600, 0), (2700, 0), (4600, 0), (8192, 0),
         *((tokens, past) for past in (5000, 21000) for tokens in (256, 384, 1200, 2700))]  # fmt: skip
OUTGROWN = 300.0  # a key so much larger is preferred by hundreds of powers of two

Layer = Callable[[int], Tensor]


class Windows(NamedTuple):
    """Requests whose blocks are scattered. All that belongs to none is not a number."""

    q: Tensor
    k: Tensor  # [layers, slots, kv_heads, d]
    v: Tensor
    tables: Tensor
    lengths: list[int]
    seq_lens: list[int]

    @classmethod
    def of(cls, lengths: list[int], pasts: list[int], layers: int = 1) -> Windows:
        seq_lens = [length + past for length, past in zip(lengths, pasts, strict=True)]
        counts = [-(-seq_len // BLOCK) for seq_len in seq_lens]
        order, begins = torch.randperm(sum(counts) + 9), [0, *accumulate(counts)]
        k = torch.full((layers, len(order) * BLOCK, KV_HEADS, DIM), float("nan"), dtype=torch.bfloat16, device=CUDA)
        v, tables = k.clone(), torch.randint(0, len(order), (len(counts), max(counts) + 3), dtype=torch.int32)
        for i, (begin, count) in enumerate(zip(begins, counts, strict=False)):
            tables[i, :count] = order[begin : begin + count]
            slots = (order[begin : begin + count, None] * BLOCK + torch.arange(BLOCK)).flatten()[: seq_lens[i]]
            k[:, slots], v[:, slots] = torch.randn(2, layers, seq_lens[i], KV_HEADS, DIM, device=CUDA).bfloat16()
        q = torch.randn(sum(lengths), HEADS + 2 * KV_HEADS, DIM, device=CUDA).bfloat16()[:, :HEADS]
        return cls(q, k, v, tables.to(CUDA), lengths, seq_lens)

    def grown(self) -> Windows:
        k = self.k.clone()
        for table, seq_len in zip(self.tables.tolist(), self.seq_lens, strict=True):
            for place in (seq_len // 3, 2 * seq_len // 3):
                k[:, table[place // BLOCK] * BLOCK + place % BLOCK] *= OUTGROWN
        return self._replace(k=k)

    def expected(self) -> Tensor:
        batch = AttentionBatch(self.lengths, self.seq_lens, self.tables.long(), torch.empty(0), BLOCK)
        return reference_attention(self.q.float(), self.k[0], self.v[0], batch, SCALE)

    def by(self, kernel: Callable[..., Tensor], rows: int, splits: int | None = None) -> Layer:
        capacity = sum(-(-length // rows) for length in self.lengths) + 5  # some tiles that do nothing
        tiles = Tiles.of(self.lengths, rows, CUDA, seq_lens=self.seq_lens, capacity=capacity)
        seq_lens = torch.tensor(self.seq_lens, dtype=torch.int32, device=CUDA)

        def attend(layer: int) -> Tensor:
            return kernel(
                self.q, self.k[layer], self.v[layer], self.tables, seq_lens, tiles, BLOCK, SCALE, splits=splits
            )

        return attend

    def plain(self) -> Layer:
        return self.by(paged_prefill, choose_rows(len(self.q), HEADS, num_sms(CUDA)))


def main() -> None:
    with torch.inference_mode():
        ragged = Windows.of([1, 5, 64, 65, 128, 130, 300, 517], [0, 3, 100, 16, 0, 1000, 77, 2000])
        few = Windows.of([1, 1, 1], [0, 15, 400])
        for name, windows in (("ragged", ragged), ("outgrown", ragged.grown()), ("single rows", few),
                              ("long past", Windows.of([200], [9000]))):  # fmt: skip
            compare(name, windows)
        for tokens, past in SIZES:
            time(tokens, past)


def compare(name: str, windows: Windows) -> None:
    expected = windows.expected()
    ways = {"plain": windows.plain(), **{f"{n} splits": windows.by(hopper_prefill, ROWS, n) for n in (1, 3)}}
    for way, attend in ways.items():
        error = (attend(0).float() - expected).abs()
        print(f"{name:12} {way:9} largest error {error.max():.5f}, mean {error.mean():.7f}", flush=True)


def time(tokens: int, past: int) -> None:
    windows = Windows.of([tokens], [past], LAYERS)
    plain, fast = medians([windows.plain(), windows.by(hopper_prefill, ROWS)])
    speed = 4 * HEADS * DIM * tokens * (past + (tokens + 1) / 2) / fast / 1e6
    print(f"{tokens:5} over {past:5}: {fast:7.1f} us ({speed:.0f} TFLOP/s), plain {plain:7.1f} us", flush=True)


def medians(ways: Sequence[Layer]) -> list[float]:
    """Microseconds of a layer, in turns. Layers follow each other, so that none finds its keys in the cache."""
    graphs, took = [recorded(way) for way in ways], [[0.0] * ROUNDS for _ in ways]
    for i in range(ROUNDS):
        for graph, times in zip(graphs, took, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[i] = begin.elapsed_time(end) * 1e3 / LAUNCHES
    return [statistics.median(times) for times in took]


def recorded(attend: Layer) -> torch.cuda.CUDAGraph:
    attend(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            attend(i % LAYERS)
    return graph


if __name__ == "__main__":
    main()
