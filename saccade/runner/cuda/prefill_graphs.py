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

from saccade.kernels.launch.compile_ahead import is_compiling
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.kernels.ops.argmax import ArgmaxWorkspace, TokenSink, argmax
from saccade.kernels.ops.prepare_inputs import (
    PrefillMetadata,
    RotaryFrequencies,
    prefill_inputs,
)
from saccade.models.cuda.decoder import FusedDecoder, Mixers
from saccade.models.cuda.residual import Gemms, Residual
from saccade.runner.cuda.block_table import BlockTables
from saccade.runner.cuda.decode_graphs import Decoded
from saccade.runner.cuda.graph_capture import capture
from saccade.runner.cuda.graph_sizes import GRAPH_PIECES, GRAPH_STRETCHES, GRAPH_TOKENS, GRAPH_WINDOWS
from saccade.runner.cuda.layer_kinds import LayerKinds
from saccade.runner.cuda.layer_pass import PrefillPass
from saccade.runner.cuda.prefill_metadata import (
    Parts,
    PrefillSizes,
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
    sizes: PrefillSizes
    metadata: Tensor  # int32, laid out by `sizes`


class _Last(NamedTuple):
    """The last row of each window, those that sample first."""

    hidden: Tensor  # [W, H], normed
    request_rows: Tensor  # int32 [W]: rows of the block tables


class PrefillGraphs:
    def __init__(
        self,
        decoder: FusedDecoder,
        kinds: LayerKinds,
        tables: BlockTables,
        block_size: int,
        axes: int,
    ) -> None:
        self.decoder = decoder
        self.kinds = kinds
        self.attention = kinds.attention
        self.tables = tables
        self.block_size = block_size
        self.axes = axes
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
        self.kinds.begin_pass(windows)
        if splice is not None:
            splice(static.embeds)
        captured.graph.replay()
        if samples:
            static.head.replay()
        outputs = (static.results.tokens, static.results.logits, static.last.hidden)
        return Decoded(*(rows[:samples] for rows in outputs))

    def _run_eager(
        self, windows: Sequence[Window], samples: int, splice: Splice | None, all_rows: bool
    ) -> Decoded:
        tokens = sum(len(window.tokens) for window in windows)
        table = self.decoder.decoder.table
        rows = self.attention.rows(tokens, is_short=self.attention.expanded_of(windows) > 0)
        tiles = sum(-(-len(window.tokens) // rows) for window in windows)
        sizes = self.kinds.sized(PrefillSizes(tokens, len(windows), self.axes, tiles), windows)
        self.kinds.begin_pass(windows)
        embeds = table.new_zeros(tokens, self.width)
        if splice is not None:
            splice(embeds)
        metadata = self.new_metadata(windows, sizes)
        x, gemms = self._layers(embeds, metadata, sizes)
        parts = Parts.of(metadata, sizes)
        every = gemms.normed(x, self.decoder.decoder) if all_rows else None
        hidden = gemms.normed(x, self.decoder.decoder, parts.last) if every is None else every[parts.last]
        decoded = self._new_found(samples)
        if samples:
            last = _Last(hidden[:samples], parts.request_rows[:samples])
            self._find(last, decoded, ArgmaxWorkspace.allocate(samples, table.device))
        return decoded._replace(hidden=hidden[:samples], rows=every)

    def capture(self, pool: Any, max_tokens: int) -> None:
        """Graphs for every size of a step, the largest first: the others share its memory."""
        graphs = self.wanted_graphs(max_tokens)
        static = self._new_static(pool, graphs)
        for sizes in tqdm(graphs, "Capturing prefill", disable=is_compiling() or None):
            self._capture(static, pool, sizes)
        self._static = static

    def wanted_graphs(self, max_tokens: int) -> list[PrefillSizes]:
        """Of all graphs for steps of up to so many tokens."""
        graphs = []
        for tokens in reversed([tokens for tokens in GRAPH_TOKENS if tokens <= _rounded(max_tokens)]):
            for is_short in sorted({False, self.attention.is_short(tokens, [tokens])}):
                for optional in sorted({False, self.kinds.is_optional}):
                    graphs.append(self.graph_sizes(tokens, is_short=is_short, optional=optional))
        return graphs

    def _capture(self, static: _Static, pool: Any, sizes: PrefillSizes) -> None:
        metadata = self.new_metadata((), sizes)
        graph = capture(partial(self._forward_into, static, metadata, sizes), pool)
        key = (sizes.tokens, sizes.is_short, sizes.stretches > 0)
        self._captured[key] = _Captured(graph, sizes, metadata)

    def new_metadata(self, windows: Sequence[Window], sizes: PrefillSizes) -> Tensor:
        flat = np.zeros(sizes.offsets()[-1], np.int32)
        self.write(flat, windows, sizes)
        return to_device(flat, self.tables.blocks.device)

    def write(self, flat: Metadata, windows: Sequence[Window], sizes: PrefillSizes) -> None:
        write_metadata(flat, windows, sizes, rows=self._rows(sizes), spare=self.tables.spare)

    def captured_sizes(self) -> list[int]:
        return sorted({tokens for tokens, _, _ in self._captured})

    def _fitting(self, tokens: int, windows: Sequence[Window]) -> _Captured | None:
        if len(windows) > GRAPH_WINDOWS or tokens > GRAPH_TOKENS[-1]:
            return None
        if sum(len(window.pieces) for window in windows) > GRAPH_PIECES:
            return None
        size = _rounded(tokens)
        is_short = self.attention.is_short(size, [window.seq_len for window in windows])
        if not is_short and self.attention.expanded_of(windows):
            return None
        crosses = is_crossing(windows)
        if crosses and len(stretches_of(windows, size)) > GRAPH_STRETCHES:
            return None
        return self._captured.get((size, is_short, crosses))

    def graph_sizes(self, tokens: int, *, is_short: bool = False, optional: bool = False) -> PrefillSizes:
        """PrefillSizes of a graph, `optional`: with kinds of layers that passes may skip."""
        tiles = -(-tokens // self.attention.rows(tokens, is_short=is_short)) + GRAPH_WINDOWS
        sizes = PrefillSizes(tokens, GRAPH_WINDOWS, self.axes, tiles, is_short)
        return self.kinds.sized(sizes, optional=optional)

    def _rows(self, sizes: PrefillSizes) -> int:
        return self.attention.rows(sizes.tokens, is_short=sizes.is_short)

    @property
    def width(self) -> int:
        """Of a row of the decoder's input."""
        return self.decoder.decoder.embedding_size

    def _new_static(self, pool: Any, graphs: Sequence[PrefillSizes]) -> _Static:
        table = self.decoder.decoder.table
        device = table.device
        request_rows = torch.full((GRAPH_WINDOWS,), self.tables.spare, device=device).int()
        last = _Last(table.new_zeros(GRAPH_WINDOWS, table.shape[1]), request_rows)
        decoded = self._new_found(GRAPH_WINDOWS)
        workspace = ArgmaxWorkspace.allocate(GRAPH_WINDOWS, device)
        head = capture(partial(self._find, last, decoded, workspace), pool)
        max_tokens = max(sizes.tokens for sizes in graphs)
        staging = PinnedStaging(max(sizes.offsets()[-1] for sizes in graphs), device)
        return _Static(table.new_zeros(max_tokens, self.width), staging, last, decoded, workspace, head)

    def _new_found(self, rows: int) -> Decoded:
        head = self.decoder.decoder.head
        return Decoded(head.new_zeros(rows, dtype=torch.int64), head.new_empty(rows, len(head)))

    def _find(self, last: _Last, decoded: Decoded, workspace: ArgmaxWorkspace) -> None:
        torch.mm(last.hidden, self.decoder.decoder.head.T, out=decoded.logits)
        self.decoder.finish(decoded.logits)
        argmax(
            decoded.logits, workspace, decoded.tokens, TokenSink(self.tables.last_tokens, last.request_rows)
        )

    def _forward_into(self, static: _Static, metadata: Tensor, sizes: PrefillSizes) -> None:
        x, gemms = self._layers(static.embeds[: sizes.tokens], metadata, sizes)
        parts = Parts.of(metadata, sizes)
        static.last.hidden.copy_(gemms.normed(x, self.decoder.decoder, parts.last))
        static.last.request_rows.copy_(parts.request_rows)

    def _layers(self, embeds: Tensor, metadata: Tensor, sizes: PrefillSizes) -> tuple[Residual, Gemms]:
        step = self.begin(embeds, metadata, sizes, 1 if sizes.is_short else None)
        gemms = self.decoder.gemms(sizes.tokens, in_parts=self.decoder.norm_eps is None)
        mixers = Mixers(self.kinds.prefill(step), self.positions(metadata, sizes))
        return self.decoder.forward(embeds, mixers, gemms), gemms

    def positions(self, metadata: Tensor, sizes: PrefillSizes) -> Tensor:
        """[axes, T]"""
        positions: Tensor = Parts.of(metadata, sizes).positions.view(self.axes, -1)
        return positions

    def begin(self, embeds: Tensor, metadata: Tensor, sizes: PrefillSizes, splits: int | None) -> PrefillPass:
        """Writes the embeddings of text tokens into `embeds`."""
        parts = Parts.of(metadata, sizes)
        decoder = self.decoder.decoder
        positions = parts.positions.view(self.axes, -1)
        tokens = parts.tokens if self.decoder.is_table else parts.tokens.clamp(max=len(decoder.table) - 1)
        rows = PrefillMetadata(tokens, positions, parts.table_rows, parts.seq_lens)
        frequencies = RotaryFrequencies(decoder.rotary.frequencies, decoder.rotary.axes)
        tables = (self.tables.blocks, self.block_size)
        temperature = self.decoder.temperature
        inputs = prefill_inputs(rows, embeds, decoder.table, frequencies, *tables, temperature)
        if not self.decoder.is_table:
            own = decoder.embed(parts.tokens.clamp(min=0))
            embeds.copy_(torch.where(parts.tokens[:, None] < 0, embeds, own))
        if decoder.rotary_gain != 1:
            inputs.cos.mul_(decoder.rotary_gain)
            inputs.sin.mul_(decoder.rotary_gain)
        tiles = Tiles(parts.starts, parts.tiles.view(-1, 2), self._rows(sizes))
        return PrefillPass(parts, inputs, sizes, tiles, splits)


class _Static(NamedTuple):
    """Buffers that the CUDA graphs read and write."""

    embeds: Tensor  # [max tokens, H or wider]
    staging: PinnedStaging
    last: _Last
    results: Decoded
    workspace: ArgmaxWorkspace
    head: torch.cuda.CUDAGraph  # from `last` to `results`


def _rounded(tokens: int) -> int:
    """The smallest captured size that holds so many, or the largest there is."""
    return next((size for size in GRAPH_TOKENS if size >= tokens), GRAPH_TOKENS[-1])
