"""Prefill on a CUDA device: metadata in one copy, and a CUDA graph for steps that are not too large.

    int32 a step   | tokens | slots | positions | rows | seq_lens | starts | last | request_rows | tiles     |
                     T        T       axes * T    W      W          W + 1    W      W              2 * tiles

A graph is captured per number of tokens; fewer are padded with rows of no window, which are not stored. It
ends with the normed last row of each window. Logits and argmax are another graph, for windows that sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from saccade.kernels.attention.prefill import PrefillAttention
from saccade.kernels.attention.prefill_flashinfer import FlashInferPrefill
from saccade.kernels.attention.rope_store_kv import rotary_and_store
from saccade.kernels.launch.device import Heads
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.kernels.ops.argmax import ArgmaxWorkspace, TokenSink, argmax
from saccade.kernels.ops.prepare_inputs import PrefillMetadata, RotaryFrequencies, prefill_inputs
from saccade.models.cuda.decoder import FusedDecoder
from saccade.runner.cuda.block_table import BlockTables
from saccade.runner.cuda.decode_graphs import Attending, Decoded
from saccade.runner.cuda.graph_sizes import GRAPH_TOKENS, GRAPH_WINDOWS
from saccade.runner.cuda.staging import Metadata, PinnedStaging, to_device

_NO_ROW = 2**30  # beyond the last row of any window

Splice = Callable[[Tensor], None]
"""Writes the embeddings of images into the packed rows [T, H or wider]."""


class Window(NamedTuple):
    """New tokens of one request."""

    row: int  # of the block tables
    tokens: npt.NDArray[np.integer[Any]]  # [tokens]; -1 where an image's embedding is written
    positions: npt.NDArray[np.integer[Any]]  # [axes, tokens]
    slots: npt.NDArray[np.integer[Any]]  # [tokens]
    seq_len: int  # tokens in the cache once these are written
    samples: bool  # the next token is sampled


class Sizes(NamedTuple):
    """Sizes of a pass's metadata."""

    tokens: int
    windows: int
    axes: int
    tiles: int
    is_short: bool = False  # of contexts, see `PrefillAttention`

    def offsets(self) -> list[int]:
        t = self.tokens
        w = self.windows
        return [0, *accumulate((t, t, self.axes * t, w, w, w + 1, w, w, 2 * self.tiles))]


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
        flash: FlashInferPrefill | None = None,
    ) -> None:
        self.decoder = decoder
        self.tables = tables
        self.block_size = block_size
        self.axes = axes
        self._flash = flash  # attends in steps large enough for it; the host plans each of them
        layer = decoder.decoder.layers[0]
        table = decoder.decoder.table
        heads = Heads(layer.heads, layer.kv_heads, layer.head_dim)
        self.attention = PrefillAttention.best(heads, table.dtype, block_size, table.device)
        self._captured: dict[tuple[int, bool], _Captured] = {}  # by tokens, and whether contexts are short
        self._static: _Static | None = None

    def run(self, windows: Sequence[Window], splice: Splice | None = None) -> Decoded:
        """The most likely next token of each window that samples, in the order of the windows."""
        tokens = sum(len(window.tokens) for window in windows)
        samples = sum(window.samples for window in windows)
        captured = self._fitting(tokens, windows)
        static = self._static
        if captured is None or static is None:
            return self._run_eager(windows, samples, splice)
        self.write(static.staging.open(), windows, captured.sizes)
        static.staging.send(captured.metadata)
        self._plan(windows, captured.sizes)
        if splice is not None:
            splice(static.embeds)
        captured.graph.replay()
        if samples:
            static.head.replay()
        return Decoded(static.found.tokens[:samples], static.found.logits[:samples])

    def _run_eager(self, windows: Sequence[Window], samples: int, splice: Splice | None) -> Decoded:
        tokens = sum(len(window.tokens) for window in windows)
        table = self.decoder.decoder.table
        rows = self.attention.rows(tokens)
        tiles = sum(-(-len(window.tokens) // rows) for window in windows)
        sizes = Sizes(tokens, len(windows), self.axes, tiles)
        self._plan(windows, sizes)
        embeds = table.new_zeros(tokens, self.width)
        if splice is not None:
            splice(embeds)
        hidden, request_rows = self._forward(embeds, self.new_metadata(windows, sizes), sizes)
        found = self._new_found(samples)
        if samples:
            last = _Last(hidden[:samples], request_rows[:samples])
            self._find(last, found, ArgmaxWorkspace.allocate(samples, table.device))
        return found

    def capture(self, pool: Any, max_tokens: int) -> None:
        """Graphs for every size of a step, the largest first: the others share its memory."""
        wanted = [tokens for tokens in GRAPH_TOKENS if tokens <= _rounded(max_tokens)]
        static = self._new_static(pool, wanted[-1])
        for tokens in tqdm(reversed(wanted), "Capturing prefill", len(wanted), disable=None):
            for is_short in {False, self.attention.is_short(tokens, tokens)}:
                self._capture(static, pool, self.graph_sizes(tokens, is_short=is_short))
        self._static = static

    def _capture(self, static: _Static, pool: Any, sizes: Sizes) -> None:
        metadata = self.new_metadata((), sizes)
        self._plan((), sizes)
        self._forward_into(static, metadata, sizes)  # compiles the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._forward_into(static, metadata, sizes)
        self._captured[sizes.tokens, sizes.is_short] = _Captured(graph, sizes, metadata)

    def new_metadata(self, windows: Sequence[Window], sizes: Sizes) -> Tensor:
        flat = np.zeros(sizes.offsets()[-1], np.int32)
        self.write(flat, windows, sizes)
        return to_device(flat, self.tables.blocks.device)

    def write(self, flat: Metadata, windows: Sequence[Window], sizes: Sizes) -> None:
        """The rest of each part is padding; positions there are not read and stay as they were."""
        parts = [flat[first:end] for first, end in pairwise(sizes.offsets())]
        tokens, slots, positions, table_rows, seq_lens, starts, last, request_rows, index = parts
        by_axis = positions.reshape(sizes.axes, -1)
        done = 0
        for window in windows:
            end = done + len(window.tokens)
            tokens[done:end] = window.tokens
            slots[done:end] = window.slots
            by_axis[:, done:end] = window.positions
            done = end
        tokens[done:] = 0
        slots[done:] = -1
        _fill(table_rows, [window.row for window in windows], self.tables.spare)
        _fill(seq_lens, [window.seq_len for window in windows], 0)
        starts[0] = 0
        _fill(starts[1:], np.cumsum([len(window.tokens) for window in windows]), done)
        samples = [i for i, window in enumerate(windows) if window.samples]
        _fill(last, starts[1:][samples] - 1, 0)
        _fill(request_rows, table_rows[samples], self.tables.spare)
        _write_tiles(index.reshape(-1, 2), windows, self._rows(sizes))

    def captured_sizes(self) -> list[int]:
        return sorted({tokens for tokens, _ in self._captured})

    def _fitting(self, tokens: int, windows: Sequence[Window]) -> _Captured | None:
        if len(windows) > GRAPH_WINDOWS or tokens > GRAPH_TOKENS[-1]:
            return None
        size = _rounded(tokens)
        longest = max(window.seq_len for window in windows)
        return self._captured.get((size, self.attention.is_short(size, longest)))

    def graph_sizes(self, tokens: int, *, is_short: bool = False) -> Sizes:
        tiles = -(-tokens // self.attention.rows(tokens, is_short=is_short)) + GRAPH_WINDOWS
        return Sizes(tokens, GRAPH_WINDOWS, self.axes, tiles, is_short)

    def _flash_for(self, sizes: Sizes) -> FlashInferPrefill | None:
        return self._flash if self._flash and self._flash.takes(sizes.tokens, sizes.windows) else None

    def _plan(self, windows: Sequence[Window], sizes: Sizes) -> None:
        flash = self._flash_for(sizes)
        if flash is not None:
            seq_lens = [window.seq_len for window in windows]
            counts = [-(-seq_len // self.block_size) for seq_len in seq_lens]
            blocks = self.tables.blocks_of([window.row for window in windows], counts)
            flash.plan([len(window.tokens) for window in windows], seq_lens, blocks)

    def _rows(self, sizes: Sizes) -> int:
        return self.attention.rows(sizes.tokens, is_short=sizes.is_short)

    @property
    def width(self) -> int:
        """Of a row of the decoder's input."""
        return self.decoder.decoder.embedding_size

    def _new_static(self, pool: Any, max_tokens: int) -> _Static:
        table = self.decoder.decoder.table
        device = table.device
        request_rows = torch.full((GRAPH_WINDOWS,), self.tables.spare, device=device).int()
        last = _Last(table.new_zeros(GRAPH_WINDOWS, table.shape[1]), request_rows)
        found = self._new_found(GRAPH_WINDOWS)
        workspace = ArgmaxWorkspace.allocate(GRAPH_WINDOWS, device)
        self._find(last, found, workspace)  # compiles the kernels
        head = torch.cuda.CUDAGraph()
        with torch.cuda.graph(head, pool=pool):
            self._find(last, found, workspace)
        staging = PinnedStaging(self.graph_sizes(max_tokens, is_short=True).offsets()[-1], device)
        return _Static(table.new_zeros(max_tokens, self.width), staging, last, found, workspace, head)

    def _new_found(self, rows: int) -> Decoded:
        head = self.decoder.decoder.head
        return Decoded(head.new_zeros(rows, dtype=torch.int64), head.new_empty(rows, len(head)))

    def _find(self, last: _Last, found: Decoded, workspace: ArgmaxWorkspace) -> None:
        torch.mm(last.hidden, self.decoder.decoder.head.T, out=found.logits)
        argmax(found.logits, workspace, found.tokens, TokenSink(self.tables.last_tokens, last.request_rows))

    def _forward_into(self, static: _Static, metadata: Tensor, sizes: Sizes) -> None:
        found = self._forward(static.embeds[: sizes.tokens], metadata, sizes)
        for target, source in zip(static.last, found, strict=True):
            target.copy_(source)

    def _forward(self, embeds: Tensor, metadata: Tensor, sizes: Sizes) -> _Last:
        attend = self.begin(embeds, metadata, sizes, 1 if sizes.is_short else None)
        gemms = self.decoder.gemms(sizes.tokens, in_parts=True)
        x = self.decoder.forward(embeds, attend, gemms)
        *_, last, request_rows, _ = _parts(metadata, sizes)
        return _Last(gemms.normed(x, self.decoder.decoder, last), request_rows)

    def begin(self, embeds: Tensor, metadata: Tensor, sizes: Sizes, splits: int | None = None) -> Attending:
        """Writes the embeddings of text tokens into `embeds`; returns the attention of these rows."""
        tokens, slots, positions, rows, seq_lens, starts, _, _, index = _parts(metadata, sizes)
        decoder = self.decoder.decoder
        tiles = Tiles(starts, index.view(-1, 2), self._rows(sizes))
        inputs = PrefillMetadata(tokens, positions.view(self.axes, -1), rows, seq_lens)
        frequencies = RotaryFrequencies(decoder.rotary.frequencies, decoder.rotary.axes)
        blocks = self.tables.blocks
        cos, sin, tables = prefill_inputs(inputs, embeds, decoder.table, frequencies, blocks, self.block_size)
        flash = self._flash_for(sizes)

        def attend(qkv: Tensor, keys: Tensor, values: Tensor, out: Tensor | None = None) -> Tensor:
            q, k, v = self.decoder.split(qkv)
            q = rotary_and_store(q, k, v, cos, sin, keys, values, slots)
            if flash is not None:
                assert out is None, "FlashInfer allocates its own output"
                return flash(q, keys, values)
            return self.attention(q, keys, values, tables, seq_lens, tiles, self.decoder.scale, out, splits)

        return attend


class _Static(NamedTuple):
    """Buffers that the CUDA graphs read and write."""

    embeds: Tensor  # [max tokens, H or wider]
    staging: PinnedStaging
    last: _Last
    found: Decoded
    workspace: ArgmaxWorkspace
    head: torch.cuda.CUDAGraph  # from `last` to `found`


def _parts(metadata: Tensor, sizes: Sizes) -> list[Tensor]:
    return [metadata[first:end] for first, end in pairwise(sizes.offsets())]


def _fill(target: Metadata, values: Sequence[int] | npt.NDArray[np.integer[Any]], padding: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = padding


def _write_tiles(index: Metadata, windows: Sequence[Window], rows: int) -> None:
    """The window and first row of each tile, the one with most keys first; see `kernels.launch.tiling`."""
    found = [
        (window.seq_len - len(window.tokens) + first, owner, first)
        for owner, window in enumerate(windows)
        for first in range(0, len(window.tokens), rows)
    ]
    found.sort(reverse=True)
    assert len(found) <= len(index), f"{len(found)} tiles in a launch of {len(index)}"
    if found:
        index[: len(found)] = np.array(found, np.int32)[:, 1:]
    index[len(found) :] = 0, _NO_ROW


def _rounded(tokens: int) -> int:
    """The smallest captured size that holds so many, or the largest there is."""
    return next((size for size in GRAPH_TOKENS if size >= tokens), GRAPH_TOKENS[-1])
