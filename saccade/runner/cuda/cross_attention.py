"""Cross-attention of a pass on a CUDA device: which rows attend to which images, and the kernel's tables.

slab of embeddings   [states, layers * k and v * kv_heads * d]    an image's states lie anywhere in it
decode tables        [requests, states]      a request's images: written once, when it begins to decode
prefill tables       [stretches, states]     written for each pass
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.attention.cross import Stretches, cross_attention, tile_tokens
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.models.cuda.decoder import Crossing, Mixing
from saccade.models.layers.cross_attention import CrossAttention, CrossLayer, unpack
from saccade.runner.batch import RequestState
from saccade.runner.cross_attention_metadata import stretches
from saccade.runner.cuda.graph_sizes import GRAPH_STRETCHES
from saccade.runner.embedding_cache import EmbeddingSlab
from saccade.types.media import Key
from saccade.types.step import ScheduledWindow


class Stretch(NamedTuple):
    """Rows of a window that attend to the same images."""

    tokens: int
    keys: tuple[Key, ...] = ()


class CrossAttentions:
    def __init__(
        self, layers: Sequence[CrossLayer], slab: EmbeddingSlab, max_requests: int, max_states: int = 0
    ) -> None:
        """`max_states`: that a token attends to, where an image may stand in a prompt several times."""
        own = layers[0].attention
        self._slab = slab
        self._kv = unpack(layers, slab.memory.view(-1, slab.width))  # [layers, 2, states, kv_heads, d]
        self._heads = (own.heads, own.kv_heads)
        states = max(len(slab.memory), max_states)
        device = slab.memory.device
        self._decode_tables = torch.zeros(max_requests + 1, states, dtype=torch.int32, device=device)
        self._prefill_tables = torch.zeros(GRAPH_STRETCHES, states, dtype=torch.int32, device=device)
        self._counts: dict[int, int] = {}  # states of a request's images, by row of the decode tables

    def close(self, row: int) -> None:
        self._counts.pop(row, None)

    def clear(self) -> None:
        self._counts.clear()

    def decode_states(self, row: int, state: RequestState) -> int:
        """States that output tokens of a request attend to; its table is written when it is asked first."""
        if row not in self._counts:
            last = next(_cut(state, state.num_prompt, state.num_prompt + 1))
            self._counts[row] = self._fill(self._decode_tables[row], last.keys)
        return self._counts[row]

    def stretches(self, window: ScheduledWindow, state: RequestState) -> tuple[Stretch, ...]:
        return tuple(_cut(state, window.start, window.end))

    def counts(self, found: Sequence[Stretch]) -> list[int]:
        """States of each stretch."""
        return [sum(len(self._slab.rows(key)) for key in stretch.keys) for stretch in found]

    def tables_for(self, found: Sequence[Stretch]) -> Tensor:
        """The tables of a prefill pass, written. Those of a CUDA graph are always the same tensor."""
        tables = self._prefill_tables
        if len(found) > len(tables):  # of a pass without a graph
            tables = tables.new_zeros(len(found), tables.shape[1])
        for row, stretch in zip(tables, found, strict=False):
            self._fill(row, stretch.keys)
        return tables

    def _fill(self, row: Tensor, keys: Sequence[Key]) -> int:
        done = 0
        for key in keys:
            states = self._slab.rows(key)
            row[done : done + len(states)].copy_(states)
            done += len(states)
        return done

    def tile_tokens(self, tokens: int) -> int:
        return tile_tokens(tokens, *self._heads)

    def decode(self, rows: Tensor, counts: Tensor) -> Crossing:
        """`rows`: of the decode tables, `counts`: states of each; int32 [T]."""
        size = len(rows)
        starts = torch.arange(size + 1, dtype=torch.int32, device=rows.device)
        index = torch.stack((starts[:-1], torch.zeros_like(starts[:-1])), dim=1)
        found = Stretches(Tiles(starts, index, 1), self._decode_tables, rows, counts)
        return Crossing(self._attend(found), (counts > 0).to(self._kv.dtype)[:, None])

    def prefill(self, tiles: Tiles, counts: Tensor, is_crossing: Tensor, tables: Tensor) -> Crossing:
        """`counts`: int32 [stretches]. `is_crossing`: int32 [T]."""
        rows = torch.arange(len(counts), dtype=torch.int32, device=counts.device)
        found = Stretches(tiles, tables, rows, counts)
        return Crossing(self._attend(found), is_crossing.to(self._kv.dtype)[:, None])

    def _attend(self, found: Stretches) -> Mixing:
        def attend(projected: Tensor, own: CrossAttention, index: int, out: Tensor | None = None) -> Tensor:
            keys, values = self._kv[index]
            by_head = None if out is None else out.view(projected.shape)
            return cross_attention(projected, keys, values, found, own.head_dim**-0.5, out=by_head).flatten(1)

        return attend


def _cut(state: RequestState, start: int, end: int) -> Iterator[Stretch]:
    """All of a window's rows; those without images in stretches of their own."""
    done = start
    for low, high, keys in stretches(state.spans, start, end):
        if low > done:
            yield Stretch(low - done)
        yield Stretch(high - low, keys)
        done = high
    if end > done:
        yield Stretch(end - done)
