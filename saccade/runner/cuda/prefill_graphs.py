"""Prefill on a CUDA device: metadata in one copy, and a CUDA graph for steps that are not too large.

    int32 a step   | tokens | slots | positions | rows | seq_lens | starts | last | request_rows | tiles     |
                     T        T       axes * T    W      W          W + 1    W      W              2 * tiles
                   | piece_starts | piece_rows | keep |    of decoders with gated delta nets
                     P + 1          P            P

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
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.kernels.ops.argmax import ArgmaxWorkspace, TokenSink, argmax
from saccade.kernels.ops.prepare_inputs import PrefillMetadata, RotaryFrequencies, prefill_inputs
from saccade.models.cuda.decoder import FusedDecoder, Mixers
from saccade.runner.cuda.block_table import BlockTables
from saccade.runner.cuda.decode_graphs import Attending, Decoded
from saccade.runner.cuda.delta_nets import DeltaNets, Mixing
from saccade.runner.cuda.graph_sizes import GRAPH_PIECES, GRAPH_TOKENS, GRAPH_WINDOWS
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
    pieces: tuple[
        tuple[int, int], ...
    ] = ()  # for recurrent states: tokens, and the row of a checkpoint or -1


class Sizes(NamedTuple):
    """Sizes of a pass's metadata."""

    tokens: int
    windows: int
    axes: int
    tiles: int
    is_short: bool = False  # of contexts, see `PrefillAttention`
    pieces: int = 0  # of windows; none without recurrent states

    def offsets(self) -> list[int]:
        t = self.tokens
        w = self.windows
        p = self.pieces
        parts = (t, t, self.axes * t, w, w, w + 1, w, w, 2 * self.tiles, p + 1, p, p)
        return [0, *accumulate(parts)]


class _Parts(NamedTuple):
    """The metadata of a pass: NumPy arrays on the host, tensors on the device."""

    tokens: Any
    slots: Any
    positions: Any  # [axes * T]
    table_rows: Any
    seq_lens: Any
    starts: Any
    last: Any
    request_rows: Any
    tiles: Any  # [2 * tiles]
    piece_starts: Any
    piece_rows: Any
    keep: Any

    @classmethod
    def of(cls, flat: Any, sizes: Sizes) -> _Parts:
        return cls(*[flat[first:end] for first, end in pairwise(sizes.offsets())])


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
        nets: DeltaNets | None = None,
    ) -> None:
        self.decoder = decoder
        self.nets = nets  # of decoders with gated delta nets
        self.tables = tables
        self.block_size = block_size
        self.axes = axes
        self._flash = flash  # attends in steps large enough for it; the host plans each of them
        table = decoder.decoder.table
        self.attention = PrefillAttention.best(decoder.heads, table.dtype, block_size, table.device)
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
        pieces = sum(len(window.pieces) for window in windows) if self.nets else 0
        sizes = Sizes(tokens, len(windows), self.axes, tiles, pieces=pieces)
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
        parts = _Parts.of(flat, sizes)
        by_axis = parts.positions.reshape(sizes.axes, -1)
        done = 0
        for window in windows:
            end = done + len(window.tokens)
            parts.tokens[done:end] = window.tokens
            parts.slots[done:end] = window.slots
            by_axis[:, done:end] = window.positions
            done = end
        parts.tokens[done:] = 0
        parts.slots[done:] = -1
        _fill(parts.table_rows, [window.row for window in windows], self.tables.spare)
        _fill(parts.seq_lens, [window.seq_len for window in windows], 0)
        parts.starts[0] = 0
        _fill(parts.starts[1:], np.cumsum([len(window.tokens) for window in windows]), done)
        samples = [i for i, window in enumerate(windows) if window.samples]
        _fill(parts.last, parts.starts[1:][samples] - 1, 0)
        _fill(parts.request_rows, parts.table_rows[samples], self.tables.spare)
        _write_tiles(parts.tiles.reshape(-1, 2), windows, self._rows(sizes))
        if sizes.pieces:
            _write_pieces(parts, windows)

    def captured_sizes(self) -> list[int]:
        return sorted({tokens for tokens, _ in self._captured})

    def _fitting(self, tokens: int, windows: Sequence[Window]) -> _Captured | None:
        if len(windows) > GRAPH_WINDOWS or tokens > GRAPH_TOKENS[-1]:
            return None
        if sum(len(window.pieces) for window in windows) > GRAPH_PIECES:
            return None
        size = _rounded(tokens)
        longest = max(window.seq_len for window in windows)
        return self._captured.get((size, self.attention.is_short(size, longest)))

    def graph_sizes(self, tokens: int, *, is_short: bool = False) -> Sizes:
        tiles = -(-tokens // self.attention.rows(tokens, is_short=is_short)) + GRAPH_WINDOWS
        return Sizes(tokens, GRAPH_WINDOWS, self.axes, tiles, is_short, GRAPH_PIECES if self.nets else 0)

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
        x = self.decoder.forward(embeds, Mixers(attend, self.begin_nets(metadata, sizes)), gemms)
        parts = _Parts.of(metadata, sizes)
        return _Last(gemms.normed(x, self.decoder.decoder, parts.last), parts.request_rows)

    def begin_nets(self, metadata: Tensor, sizes: Sizes) -> Mixing | None:
        """The gated delta nets of these rows, of decoders that have some."""
        parts = _Parts.of(metadata, sizes)
        if self.nets is None:
            return None
        return self.nets.prefill(parts.piece_starts, parts.piece_rows, parts.keep, sizes.tokens)

    def begin(self, embeds: Tensor, metadata: Tensor, sizes: Sizes, splits: int | None = None) -> Attending:
        """Writes the embeddings of text tokens into `embeds`; returns the attention of these rows."""
        parts = _Parts.of(metadata, sizes)
        slots = parts.slots
        seq_lens = parts.seq_lens
        decoder = self.decoder.decoder
        tiles = Tiles(parts.starts, parts.tiles.view(-1, 2), self._rows(sizes))
        inputs = PrefillMetadata(
            parts.tokens, parts.positions.view(self.axes, -1), parts.table_rows, seq_lens
        )
        frequencies = RotaryFrequencies(decoder.rotary.frequencies, decoder.rotary.axes)
        blocks = self.tables.blocks
        table = decoder.table
        given = (inputs, embeds, table, frequencies, blocks, self.block_size, self.decoder.temperature)
        cos, sin, tables, scales = prefill_inputs(*given)
        flash = self._flash_for(sizes)

        def attend(qkv: Tensor, keys: Tensor, values: Tensor, out: Tensor | None = None) -> Tensor:
            q, k, v = self.decoder.split(qkv)
            q = rotary_and_store(q, k, v, cos, sin, keys, values, slots, scales)
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


def _fill(target: Metadata, values: Sequence[int] | npt.NDArray[np.integer[Any]], padding: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = padding


def _write_pieces(parts: _Parts, windows: Sequence[Window]) -> None:
    """Where each piece begins, its state's row (-1: unused) and the row of its checkpoint (-1: none)."""
    pieces = [(length, window.row, kept) for window in windows for length, kept in window.pieces]
    lengths = [length for length, _, _ in pieces]
    parts.piece_starts[0] = 0
    _fill(parts.piece_starts[1:], np.cumsum(lengths), sum(lengths))
    _fill(parts.piece_rows, [row for _, row, _ in pieces], -1)
    _fill(parts.keep, [kept for _, _, kept in pieces], -1)


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
