"""Cross-attention of a pass on a CUDA device: which rows attend to which images, and the kernel's tables.

slab of embeddings   [states, layers * k and v * kv_heads * d]    an image's states lie anywhere in it
decode tables        [requests, states]      a request's images: written once, when it begins to decode
prefill tables       [stretches, states]     written for each pass
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from saccade.kernels.attention.cross import Stretches, cross_attention, tile_tokens
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.models.cuda.decoder import Mixer, Mixing
from saccade.models.layers.cross_attention import CrossAttention, CrossDecoder, CrossLayer, unpack
from saccade.runner.batch import RequestState
from saccade.runner.cross_attention_metadata import stretches as attended_stretches
from saccade.runner.cuda.graph_sizes import GRAPH_STRETCHES
from saccade.runner.cuda.layer_pass import DecodePass, DecoderParts, PrefillPass
from saccade.runner.cuda.prefill_metadata import PrefillSizes, Stretch, Window, is_crossing, stretches_of
from saccade.runner.cuda.staging import Metadata
from saccade.runner.embedding_cache import EmbeddingSlab
from saccade.runner.forward import Windows
from saccade.types.media import Key
from saccade.types.step import Admission, ScheduledWindow


class CrossAttentions:
    layer = CrossAttention
    is_optional = True  # passes in which no row attends to an image skip its layers

    @classmethod
    def of(cls, parts: DecoderParts) -> Self | None:
        decoder: Any = parts.fused.decoder
        if not isinstance(decoder, CrossDecoder):
            return None
        assert parts.slab is not None, "cross-attention reads the slab of embeddings"
        return cls(decoder.cross_layers, parts.slab, parts.max_requests, parts.max_cross_states)

    def __init__(
        self, layers: Sequence[CrossLayer], slab: EmbeddingSlab, max_requests: int, max_states: int = 0
    ) -> None:
        """`max_states`: that a token attends to, where an image may stand in a prompt several times."""
        module = layers[0].attention
        self._slab = slab
        self._kv = unpack(layers, slab.memory.view(-1, slab.width))  # [layers, 2, states, kv_heads, d]
        self._heads = (module.heads, module.kv_heads)
        states = max(len(slab.memory), max_states)
        device = slab.memory.device
        self._decode_tables = torch.zeros(max_requests + 1, states, dtype=torch.int32, device=device)
        self._prefill_tables = torch.zeros(GRAPH_STRETCHES, states, dtype=torch.int32, device=device)
        self._pass_tables = self._prefill_tables  # of the latest pass
        self._counts: dict[int, int] = {}  # states of a request's images, by row of the decode tables

    def open(self, admission: Admission, row: int) -> None:
        """Its table is written when it decodes first."""

    def close(self, request_id: str, row: int | None) -> None:
        if row is not None:
            self._counts.pop(row, None)

    def clear(self) -> None:
        self._counts.clear()

    def begin_decode(self, windows: Windows, rows: Metadata, states: Metadata) -> None:
        pairs = zip(windows, rows.tolist(), strict=True)
        states[:] = [self._decode_states(state, row) for (_, state), row in pairs]

    def _decode_states(self, state: RequestState, row: int) -> int:
        """States that output tokens of a request attend to; its table is written when it is asked first."""
        if row not in self._counts:
            last = next(_cut(state, state.num_prompt, state.num_prompt + 1))
            self._counts[row] = self._fill(self._decode_tables[row], last.keys)
        return self._counts[row]

    def begin_prefill(self, rows: Window, window: ScheduledWindow, state: RequestState) -> Window:
        stretches = _cut(state, window.start, window.end)
        return rows._replace(
            stretches=tuple(stretch._replace(states=self._states_of(stretch.keys)) for stretch in stretches)
        )

    def sized(self, sizes: PrefillSizes, windows: Sequence[Window] | None) -> PrefillSizes:
        stretches = GRAPH_STRETCHES
        if windows is not None:
            if not is_crossing(windows):
                return sizes
            stretches = len(stretches_of(windows, sizes.tokens))
        return sizes._replace(stretches=stretches, stretch_rows=tile_tokens(sizes.tokens, *self._heads))

    def _states_of(self, keys: Sequence[Key]) -> int:
        return sum(len(self._slab.rows(key)) for key in keys)

    def begin_pass(self, windows: Sequence[Window]) -> None:
        """The tables of a CUDA graph are always the same tensor."""
        if not is_crossing(windows):
            return
        stretches = stretches_of(windows)
        self._pass_tables = self._prefill_tables
        if len(stretches) > len(self._prefill_tables):  # of a pass without a graph
            self._pass_tables = self._prefill_tables.new_zeros(len(stretches), self._prefill_tables.shape[1])
        for row, stretch in zip(self._pass_tables, stretches, strict=False):
            self._fill(row, stretch.keys)

    def _fill(self, row: Tensor, keys: Sequence[Key]) -> int:
        offset = 0
        for key in keys:
            states = self._slab.rows(key)
            row[offset : offset + len(states)].copy_(states)
            offset += len(states)
        return offset

    def decode(self, step: DecodePass) -> Mixer | None:
        if not step.has_images:
            return None
        rows = step.metadata.rows  # of the decode tables
        counts = step.states
        size = len(rows)
        starts = torch.arange(size + 1, dtype=torch.int32, device=rows.device)
        index = torch.stack((starts[:-1], torch.zeros_like(starts[:-1])), dim=1)
        stretches = Stretches(Tiles(starts, index, 1), self._decode_tables, rows, counts)
        return Mixer(self._attend(stretches), (counts > 0).to(self._kv.dtype)[:, None])

    def prefill(self, step: PrefillPass) -> Mixer | None:
        if not step.sizes.stretches:
            return None
        parts = step.parts
        tiles = Tiles(parts.stretch_starts, parts.stretch_tiles.view(-1, 2), step.sizes.stretch_rows)
        counts = parts.stretch_counts
        rows = torch.arange(len(counts), dtype=torch.int32, device=counts.device)
        fits = len(counts) <= len(self._prefill_tables)  # as in all CUDA graphs
        stretches = Stretches(tiles, self._prefill_tables if fits else self._pass_tables, rows, counts)
        return Mixer(self._attend(stretches), parts.is_crossing.to(self._kv.dtype)[:, None])

    def _attend(self, stretches: Stretches) -> Mixing:
        def attend(
            projected: Tensor, module: CrossAttention, index: int, out: Tensor | None = None
        ) -> Tensor:
            keys, values = self._kv[index]
            by_head = None if out is None else out.view(projected.shape)
            return cross_attention(
                projected, keys, values, stretches, module.head_dim**-0.5, out=by_head
            ).flatten(1)

        return attend


def _cut(state: RequestState, start: int, end: int) -> Iterator[Stretch]:
    """All of a window's rows; those without images in stretches of their own."""
    row = start
    for low, high, keys in attended_stretches(state.spans, start, end):
        if low > row:
            yield Stretch(low - row)
        yield Stretch(high - low, keys)
        row = high
    if end > row:
        yield Stretch(end - row)
