"""Prefill on a CUDA device: metadata in one copy, and a CUDA graph for steps that are not too large.

A graph is captured per number of tokens; fewer are padded with rows of no window, which are not stored. It
ends with the normed last row of each window. Logits and argmax are another graph, for windows that sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from saccade.kernels.attention.mla_expanded import GATHERED
from saccade.kernels.attention.prefill import PrefillAttention
from saccade.kernels.attention.rope_store_kv import rotary_and_store
from saccade.kernels.launch.compile_ahead import is_compiling
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.kernels.ops.argmax import ArgmaxWorkspace, TokenSink, argmax
from saccade.kernels.ops.prepare_inputs import (
    PrefillInputs,
    PrefillMetadata,
    RotaryFrequencies,
    prefill_inputs,
)
from saccade.kernels.ops.qk_norm import qk_rms_norm
from saccade.models.cuda.decoder import Crossing, FusedDecoder, Mixers, Mixing
from saccade.models.cuda.residual import Gemms, Residual
from saccade.runner.cuda.block_table import BlockTables
from saccade.runner.cuda.cross_attention import CrossAttentions
from saccade.runner.cuda.decode_graphs import Decoded
from saccade.runner.cuda.gated_delta_net import DeltaNets
from saccade.runner.cuda.graph_capture import capture
from saccade.runner.cuda.graph_sizes import GRAPH_PIECES, GRAPH_STRETCHES, GRAPH_TOKENS, GRAPH_WINDOWS
from saccade.runner.cuda.mla import LatentAttentions, LatentStep
from saccade.runner.cuda.prefill_metadata import (
    Parts,
    Sizes,
    Window,
    is_crossing,
    stretches_of,
    write_metadata,
)
from saccade.runner.cuda.staging import Metadata, PinnedStaging, to_device

Splice = Callable[[Tensor], None]
"""Writes the embeddings of images into the packed rows [T, H or wider]."""


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    sizes: Sizes
    metadata: Tensor  # int32, laid out by `sizes`


class _Last(NamedTuple):
    """The last row of each window, those that sample first."""

    hidden: Tensor  # [W, H], normed
    request_rows: Tensor  # int32 [W]: rows of the block tables


class PrefillGraphs:
    def __init__(
        self,
        decoder: FusedDecoder,
        tables: BlockTables,
        block_size: int,
        axes: int,
        nets: DeltaNets | None = None,
        latent: LatentAttentions | None = None,
        cross: CrossAttentions | None = None,
    ) -> None:
        self.decoder = decoder
        self.nets = nets  # of decoders with gated delta nets
        self.latent = latent  # of decoders with MLA
        self.cross = cross  # of decoders with cross-attention
        self.tables = tables
        self.block_size = block_size
        self.axes = axes
        table = decoder.decoder.table
        self._own = None
        if latent is None:
            self._own = PrefillAttention(decoder.heads, decoder.kv.k.dtype, block_size, table.device)
        # By tokens, whether contexts are short, and whether rows cross-attend.
        self._captured: dict[tuple[int, bool, bool], _Captured] = {}
        self._static: _Static | None = None

    def run(
        self, windows: Sequence[Window], splice: Splice | None = None, *, all_rows: bool = False
    ) -> Decoded:
        """The most likely next token of each window that samples, in the order of the windows.

        With `all_rows` the rows of all tokens, too: launched without a graph, since those end with last rows.
        """
        tokens = sum(len(window.tokens) for window in windows)
        samples = sum(window.samples for window in windows)
        captured = self._fitting(tokens, windows)
        static = self._static
        if captured is None or static is None or all_rows:
            return self._run_eager(windows, samples, splice, all_rows)
        self.write(static.staging.open(), windows, captured.sizes)
        static.staging.send(captured.metadata)
        self.fill_tables(windows)
        if splice is not None:
            splice(static.embeds)
        captured.graph.replay()
        if samples:
            static.head.replay()
        found = (static.found.tokens, static.found.logits, static.last.hidden)
        return Decoded(*(rows[:samples] for rows in found))

    def _run_eager(
        self, windows: Sequence[Window], samples: int, splice: Splice | None, all_rows: bool
    ) -> Decoded:
        tokens = sum(len(window.tokens) for window in windows)
        table = self.decoder.decoder.table
        expanded = self._expanded(windows)
        rows = self.attention.rows(tokens, is_short=expanded > 0)
        tiles = sum(-(-len(window.tokens) // rows) for window in windows)
        pieces = sum(len(window.pieces) for window in windows) if self.nets else 0
        sizes = Sizes(tokens, len(windows), self.axes, tiles, expanded > 0, pieces, expanded)
        if is_crossing(windows):
            sizes = self._crossing(sizes, len(stretches_of(windows, tokens)))
        tables = self.fill_tables(windows)
        embeds = table.new_zeros(tokens, self.width)
        if splice is not None:
            splice(embeds)
        metadata = self.new_metadata(windows, sizes)
        x, gemms = self._layers(embeds, metadata, sizes, tables)
        parts = Parts.of(metadata, sizes)
        every = gemms.normed(x, self.decoder.decoder) if all_rows else None
        hidden = gemms.normed(x, self.decoder.decoder, parts.last) if every is None else every[parts.last]
        found = self._new_found(samples)
        if samples:
            last = _Last(hidden[:samples], parts.request_rows[:samples])
            self._find(last, found, ArgmaxWorkspace.allocate(samples, table.device))
        return found._replace(hidden=hidden[:samples], rows=every)

    def capture(self, pool: Any, max_tokens: int) -> None:
        """Graphs for every size of a step, the largest first: the others share its memory."""
        wanted = self.wanted_graphs(max_tokens)
        static = self._new_static(pool, wanted)
        for sizes in tqdm(wanted, "Capturing prefill", disable=is_compiling() or None):
            self._capture(static, pool, sizes)
        self._static = static

    def wanted_graphs(self, max_tokens: int) -> list[Sizes]:
        """Of all graphs for steps of up to so many tokens."""
        found = []
        for tokens in reversed([tokens for tokens in GRAPH_TOKENS if tokens <= _rounded(max_tokens)]):
            for is_short in sorted({False, self.attention.is_short(tokens, [tokens])}):
                sizes = self.graph_sizes(tokens, is_short=is_short)
                found += [sizes, self._crossing(sizes, GRAPH_STRETCHES)] if self.cross else [sizes]
        return found

    def _capture(self, static: _Static, pool: Any, sizes: Sizes) -> None:
        metadata = self.new_metadata((), sizes)
        graph = capture(partial(self._forward_into, static, metadata, sizes), pool)
        key = (sizes.tokens, sizes.is_short, sizes.stretches > 0)
        self._captured[key] = _Captured(graph, sizes, metadata)

    def new_metadata(self, windows: Sequence[Window], sizes: Sizes) -> Tensor:
        flat = np.zeros(sizes.offsets()[-1], np.int32)
        self.write(flat, windows, sizes)
        return to_device(flat, self.tables.blocks.device)

    def write(self, flat: Metadata, windows: Sequence[Window], sizes: Sizes) -> None:
        states = self.cross.counts if self.cross else None
        rows = self._rows(sizes)
        write_metadata(flat, windows, sizes, rows=rows, spare=self.tables.spare, states=states)

    def captured_sizes(self) -> list[int]:
        return sorted({tokens for tokens, _, _ in self._captured})

    def _fitting(self, tokens: int, windows: Sequence[Window]) -> _Captured | None:
        if len(windows) > GRAPH_WINDOWS or tokens > GRAPH_TOKENS[-1]:
            return None
        if sum(len(window.pieces) for window in windows) > GRAPH_PIECES:
            return None
        size = _rounded(tokens)
        is_short = self.attention.is_short(size, [window.seq_len for window in windows])
        if not is_short and self._expanded(windows):
            return None
        crosses = is_crossing(windows)
        if crosses and len(stretches_of(windows, size)) > GRAPH_STRETCHES:
            return None
        return self._captured.get((size, is_short, crosses))

    def _expanded(self, windows: Sequence[Window]) -> int:
        """Tokens of contexts that MLA should expand, whatever graphs hold."""
        if self.latent is None:
            return 0
        lengths = [len(window.tokens) for window in windows]
        return self.latent.expanded(lengths, [window.seq_len for window in windows])

    def graph_sizes(self, tokens: int, *, is_short: bool = False) -> Sizes:
        tiles = -(-tokens // self.attention.rows(tokens, is_short=is_short)) + GRAPH_WINDOWS
        pieces = GRAPH_PIECES if self.nets else 0
        expanded = tokens if self.latent and is_short else 0
        return Sizes(tokens, GRAPH_WINDOWS, self.axes, tiles, is_short, pieces, expanded)

    def mixed_sizes(self, tokens: int) -> Sizes:
        """Of a mixed batch, whose graph has all kinds of layers."""
        sizes = self.graph_sizes(tokens)
        return self._crossing(sizes, GRAPH_STRETCHES) if self.cross else sizes

    def _crossing(self, sizes: Sizes, stretches: int) -> Sizes:
        """Of the same pass with cross-attention."""
        assert self.cross is not None
        return sizes._replace(stretches=stretches, stretch_rows=self.cross.tile_tokens(sizes.tokens))

    def fill_tables(self, windows: Sequence[Window]) -> Tensor | None:
        """Which states of images each stretch attends to, on the device; None: none does."""
        if self.cross is None or not is_crossing(windows):
            return None
        return self.cross.tables_for(stretches_of(windows))

    def _rows(self, sizes: Sizes) -> int:
        return self.attention.rows(sizes.tokens, is_short=sizes.is_short)

    @property
    def attention(self) -> PrefillAttention | LatentAttentions:
        """What chooses tiles and splits."""
        attention = self._own or self.latent
        assert attention is not None
        return attention

    @property
    def width(self) -> int:
        """Of a row of the decoder's input."""
        return self.decoder.decoder.embedding_size

    def _new_static(self, pool: Any, wanted: Sequence[Sizes]) -> _Static:
        table = self.decoder.decoder.table
        device = table.device
        request_rows = torch.full((GRAPH_WINDOWS,), self.tables.spare, device=device).int()
        last = _Last(table.new_zeros(GRAPH_WINDOWS, table.shape[1]), request_rows)
        found = self._new_found(GRAPH_WINDOWS)
        workspace = ArgmaxWorkspace.allocate(GRAPH_WINDOWS, device)
        head = capture(partial(self._find, last, found, workspace), pool)
        max_tokens = max(sizes.tokens for sizes in wanted)
        staging = PinnedStaging(max(sizes.offsets()[-1] for sizes in wanted), device)
        return _Static(table.new_zeros(max_tokens, self.width), staging, last, found, workspace, head)

    def _new_found(self, rows: int) -> Decoded:
        head = self.decoder.decoder.head
        return Decoded(head.new_zeros(rows, dtype=torch.int64), head.new_empty(rows, len(head)))

    def _find(self, last: _Last, found: Decoded, workspace: ArgmaxWorkspace) -> None:
        torch.mm(last.hidden, self.decoder.decoder.head.T, out=found.logits)
        argmax(found.logits, workspace, found.tokens, TokenSink(self.tables.last_tokens, last.request_rows))

    def _forward_into(self, static: _Static, metadata: Tensor, sizes: Sizes) -> None:
        x, gemms = self._layers(static.embeds[: sizes.tokens], metadata, sizes)
        parts = Parts.of(metadata, sizes)
        static.last.hidden.copy_(gemms.normed(x, self.decoder.decoder, parts.last))
        static.last.request_rows.copy_(parts.request_rows)

    def _layers(
        self, embeds: Tensor, metadata: Tensor, sizes: Sizes, tables: Tensor | None = None
    ) -> tuple[Residual, Gemms]:
        """`tables`: of cross-attention, where they are not those of CUDA graphs."""
        attend = self.begin(embeds, metadata, sizes, 1 if sizes.is_short else None)
        gemms = self.decoder.gemms(sizes.tokens, in_parts=self.decoder.norm_eps is None)
        nets = self.begin_nets(metadata, sizes)
        cross = self.begin_cross(metadata, sizes, tables)
        mixers = Mixers(attend, nets, cross, self.positions(metadata, sizes))
        return self.decoder.forward(embeds, mixers, gemms), gemms

    def positions(self, metadata: Tensor, sizes: Sizes) -> Tensor:
        """Of the first axis."""
        positions: Tensor = Parts.of(metadata, sizes).positions[: sizes.tokens]
        return positions

    def begin_nets(self, metadata: Tensor, sizes: Sizes) -> Mixing | None:
        """The gated delta nets of these rows, of decoders that have some."""
        parts = Parts.of(metadata, sizes)
        if self.nets is None:
            return None
        return self.nets.prefill(parts.piece_starts, parts.piece_rows, parts.keep, sizes.tokens)

    def begin_cross(self, metadata: Tensor, sizes: Sizes, tables: Tensor | None = None) -> Crossing | None:
        """Cross-attention of these rows; None: no row attends to an image."""
        if self.cross is None or not sizes.stretches:
            return None
        parts = Parts.of(metadata, sizes)
        tiles = Tiles(parts.stretch_starts, parts.stretch_tiles.view(-1, 2), sizes.stretch_rows)
        tables = self.cross.tables_for(()) if tables is None else tables
        return self.cross.prefill(tiles, parts.stretch_counts, parts.is_crossing, tables)

    def begin(self, embeds: Tensor, metadata: Tensor, sizes: Sizes, splits: int | None = None) -> Mixing:
        """Writes the embeddings of text tokens into `embeds`; returns the attention of these rows."""
        parts = Parts.of(metadata, sizes)
        decoder = self.decoder.decoder
        positions = parts.positions.view(self.axes, -1)
        rows = PrefillMetadata(parts.tokens, positions, parts.table_rows, parts.seq_lens)
        frequencies = RotaryFrequencies(decoder.rotary.frequencies, decoder.rotary.axes)
        tables = (self.tables.blocks, self.block_size)
        temperature = self.decoder.temperature
        inputs = prefill_inputs(rows, embeds, decoder.table, frequencies, *tables, temperature)
        if decoder.rotary_gain != 1:
            inputs.cos.mul_(decoder.rotary_gain)
            inputs.sin.mul_(decoder.rotary_gain)
        if self.latent is not None:
            return self._attend_latent(self.latent, parts, inputs, sizes, splits)
        return self._attend(parts, inputs, sizes, splits)

    def _attend(self, parts: Parts, inputs: PrefillInputs, sizes: Sizes, splits: int | None) -> Mixing:
        attention = self._own
        assert attention is not None
        tiles = self._tiles(parts, sizes)
        kv = self.decoder.kv

        def attend(projected: Tensor, own: Any, index: int, out: Tensor | None = None) -> Tensor:
            norms = own.qk_norms
            if norms is not None:
                qk_rms_norm(projected, norms.q.weight, norms.k.weight, own.heads, norms.eps)  # in place
            q, k, v = self.decoder.split(projected)
            cached = (kv.k[index], kv.v[index])
            rotation = (inputs.cos, inputs.sin)
            scales = kv.scales_of(index)
            q = rotary_and_store(q, k, v, *rotation, *cached, parts.slots, inputs.query_scales, scales)
            by_head = None if out is None else out.view(q.shape)
            given = (*cached, inputs.tables, parts.seq_lens, tiles, self.decoder.scale)
            return attention(q, *given, by_head, splits, scales).flatten(1)

        return attend

    def _attend_latent(
        self, latent: LatentAttentions, parts: Parts, inputs: PrefillInputs, sizes: Sizes, splits: int | None
    ) -> Mixing:
        step = LatentStep(inputs.cos, inputs.sin, parts.slots, inputs.tables, parts.seq_lens)
        tiles = self._tiles(parts, sizes)
        if not sizes.expanded:
            return latent.prefill(step, tiles, splits)
        contexts = Tiles(parts.context_starts, parts.context_tiles.view(-1, 2), GATHERED)
        return latent.prefill_expanded(step, tiles, contexts, sizes.expanded)

    def _tiles(self, parts: Parts, sizes: Sizes) -> Tiles:
        return Tiles(parts.starts, parts.tiles.view(-1, 2), self._rows(sizes))


class _Static(NamedTuple):
    """Buffers that the CUDA graphs read and write."""

    embeds: Tensor  # [max tokens, H or wider]
    staging: PinnedStaging
    last: _Last
    found: Decoded
    workspace: ArgmaxWorkspace
    head: torch.cuda.CUDAGraph  # from `last` to `found`


def _rounded(tokens: int) -> int:
    """The smallest captured size that holds so many, or the largest there is."""
    return next((size for size in GRAPH_TOKENS if size >= tokens), GRAPH_TOKENS[-1])
