"""Windows of several tokens on a CUDA device: what they need travels in one copy, small ones replay a recorded graph.

    one int32 array a step      | slots | positions ...  | rows | contexts | starts | tiles ... |
                                  T       axes * T         R      R          R + 1    2 * tiles

A graph is recorded for a number of tokens; fewer are padded with rows that belong to no window and are not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from saccade.kernels.paged_decode import num_multiprocessors
from saccade.kernels.paged_prefill import choose_rows, paged_prefill
from saccade.kernels.store_kv import rotary_and_store
from saccade.kernels.tiles import Tiles
from saccade.models.fused import FusedDecoder
from saccade.runner.tables import BlockTables, to_device

GRAPH_TOKENS: tuple[int, ...] = (
    *(16, 32, 64, 96),
    *range(128, 2048, 128),
    *range(2048, 4096, 256),
    *range(4096, 8193, 512),
)
GRAPH_WINDOWS = 16
"""Steps beyond these are launched one kernel at a time, which takes the host longer than the device."""


class Window(NamedTuple):
    """New tokens of one request."""

    row: int  # of the block tables
    positions: npt.NDArray[np.int64]  # [axes, tokens]
    slots: npt.NDArray[np.int64]  # [tokens]
    context: int  # tokens in the cache once these are written


class _Sizes(NamedTuple):
    tokens: int
    windows: int
    axes: int
    tiles: int

    def offsets(self) -> list[int]:
        parts = (self.tokens, self.axes * self.tokens, self.windows, self.windows, self.windows + 1, 2 * self.tiles)
        return [0, *np.cumsum(parts).tolist()]


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    sizes: _Sizes
    numbers: Tensor  # int32, laid out by `sizes`
    hidden: Tensor


class PromptPass:
    def __init__(self, decoder: FusedDecoder, tables: BlockTables, block_size: int, axes: int) -> None:
        self.decoder = decoder
        self.tables = tables
        self.block_size = block_size
        self.axes = axes
        self._heads = decoder.decoder.layers[0].heads
        self._multiprocessors = num_multiprocessors(tables.blocks.device)
        self._recorded: dict[int, _Recorded] = {}
        self._embeds: Tensor | None = None  # [most tokens, H]: where the recorded graphs read

    def run(self, embeds: Tensor, windows: Sequence[Window]) -> Tensor:
        """Embeddings of the windows' tokens [T, H] -> normed hidden states [T, H]."""
        tokens = len(embeds)
        recorded = self._fitting(tokens, len(windows))
        if recorded is None:
            sizes = self._sizes(tokens, len(windows), sum(-(-len(w.slots) // self._rows(tokens)) for w in windows))
            return self._forward(embeds, to_device(self._numbers(windows, sizes), embeds.device), sizes)
        assert self._embeds is not None
        recorded.numbers.copy_(to_device(self._numbers(windows, recorded.sizes), embeds.device))
        self._embeds[:tokens] = embeds
        recorded.graph.replay()
        return recorded.hidden[:tokens]

    def record(self, pool: Any, hidden_size: int, dtype: torch.dtype, max_tokens: int) -> None:
        """Graphs for every size a step may have, the largest first: the others find room in its memory."""
        device = self.tables.blocks.device
        wanted = [tokens for tokens in GRAPH_TOKENS if tokens <= _rounded(max_tokens)]
        self._embeds = torch.zeros(wanted[-1], hidden_size, dtype=dtype, device=device)
        for tokens in tqdm(reversed(wanted), "Recording prompts", len(wanted), disable=None):
            sizes = self._sizes(tokens, GRAPH_WINDOWS, -(-tokens // self._rows(tokens)) + GRAPH_WINDOWS)
            numbers, embeds = to_device(self._numbers((), sizes), device), self._embeds[:tokens]
            self._forward(embeds, numbers, sizes)  # compiles the kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden = self._forward(embeds, numbers, sizes)
            self._recorded[tokens] = _Recorded(graph, sizes, numbers, hidden)

    def recorded_sizes(self) -> list[int]:
        return sorted(self._recorded)

    def _fitting(self, tokens: int, windows: int) -> _Recorded | None:
        if windows > GRAPH_WINDOWS or tokens > GRAPH_TOKENS[-1]:
            return None
        return self._recorded.get(_rounded(tokens))

    def _sizes(self, tokens: int, windows: int, tiles: int) -> _Sizes:
        return _Sizes(tokens, windows, self.axes, tiles)

    def _rows(self, tokens: int) -> int:
        return choose_rows(tokens, self._heads, self._multiprocessors)

    def _numbers(self, windows: Sequence[Window], sizes: _Sizes) -> npt.NDArray[np.int32]:
        at = sizes.offsets()
        flat = np.zeros(at[-1], np.int32)
        flat[: sizes.tokens] = -1
        if windows:
            slots = np.concatenate([w.slots for w in windows])
            flat[: len(slots)] = slots
            positions = np.concatenate([w.positions for w in windows], axis=1)
            flat[at[1] : at[2]].reshape(self.axes, -1)[:, : len(slots)] = positions
            flat[at[2] : at[2] + len(windows)] = [w.row for w in windows]
            flat[at[3] : at[3] + len(windows)] = [w.context for w in windows]
        lengths = [len(w.slots) for w in windows] + [0] * (sizes.windows - len(windows))
        contexts = [w.context for w in windows] + [0] * (sizes.windows - len(windows))
        tiles = Tiles.of(
            lengths, self._rows(sizes.tokens), torch.device("cpu"), contexts=contexts, capacity=sizes.tiles
        )
        flat[at[4] : at[5]] = tiles.starts.numpy()
        flat[at[5] :] = tiles.index.numpy().ravel()
        return flat

    def _forward(self, embeds: Tensor, numbers: Tensor, sizes: _Sizes) -> Tensor:
        slots, positions, rows, contexts, starts, index = (
            numbers[first:last] for first, last in zip(sizes.offsets(), sizes.offsets()[1:], strict=False)
        )
        tables = self.tables.blocks.index_select(0, rows)
        tiles = Tiles(starts, index.view(-1, 2), self._rows(sizes.tokens))
        cos, sin = self.decoder.angles(positions.view(self.axes, -1))
        products = self.decoder.products(sizes.tokens)

        def attend(qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            q, k, v = self.decoder.split(qkv)
            rotary_and_store(q, k, v, cos, sin, keys, values, slots)
            return paged_prefill(q, keys, values, tables, contexts, tiles, self.block_size, self.decoder.scale)

        return products.normed(self.decoder.forward(embeds, attend, products), self.decoder.decoder)


def _rounded(tokens: int) -> int:
    """The smallest recorded size that holds so many, or the largest there is."""
    return next((size for size in GRAPH_TOKENS if size >= tokens), GRAPH_TOKENS[-1])
