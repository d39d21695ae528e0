"""The metadata of a prefill pass, sent to the device in one copy. Knows sizes and windows, no kernel.

int32 a step   | tokens | slots | positions | rows | seq_lens | starts | last | request_rows | tiles     |
                 T        T       axes * T    W      W          W + 1    W      W              2 * tiles
               | piece_starts | piece_rows | keep |      | context_starts | context_tiles |
                 P + 1          P            P             W + 1            2 * tiles
                 of decoders with gated delta nets         where MLA expands contexts
               | is_crossing | stretch_starts | stretch_counts | stretch_tiles |
                 T             S + 1            S                2 * tiles         of cross-attention
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from saccade.kernels.attention.mla_expanded import GATHERED
from saccade.runner.cuda.staging import Metadata
from saccade.types.media import Key

_NO_ROW = 2**30  # beyond the last row of any window


class Stretch(NamedTuple):
    """Rows of a window that attend to the same images."""

    tokens: int
    keys: tuple[Key, ...] = ()
    states: int = 0  # of these images


class Window(NamedTuple):
    """New tokens of one request."""

    row: int  # of the block tables
    tokens: npt.NDArray[np.integer[Any]]  # [tokens]; -1 where an image's embedding is written
    positions: npt.NDArray[np.integer[Any]]  # [axes, tokens]
    slots: npt.NDArray[np.integer[Any]]  # [tokens]
    seq_len: int  # tokens in the cache once these are written
    samples: bool  # the next token is sampled
    pieces: tuple[tuple[int, int], ...] = ()  # for recurrent states: tokens, row of a checkpoint or -1
    stretches: tuple[Stretch, ...] = ()  # for cross-attention: all tokens, where any attends to an image


class PrefillSizes(NamedTuple):
    """PrefillSizes of a pass's metadata."""

    tokens: int
    windows: int
    axes: int
    tiles: int
    is_short: bool = False  # of contexts, see `PrefillAttention`
    pieces: int = 0  # of windows; none without recurrent states
    expanded: int = 0  # tokens of contexts that MLA expands
    stretches: int = 0  # for cross-attention, the one of padding included
    stretch_rows: int = 1  # tokens of a tile of one

    def offsets(self) -> list[int]:
        t = self.tokens
        w = self.windows
        p = self.pieces
        c = -(-self.expanded // GATHERED) + w if self.expanded else 0
        s = self.stretches
        common = (t, t, self.axes * t, w, w, w + 1, w, w, 2 * self.tiles, p + 1, p, p, w + 1, 2 * c)
        cross = (t, s + 1, s, 2 * (-(-t // self.stretch_rows) + s)) if s else (0, 0, 0, 0)
        return [0, *accumulate((*common, *cross))]


class Parts(NamedTuple):
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
    context_starts: Any
    context_tiles: Any
    is_crossing: Any
    stretch_starts: Any
    stretch_counts: Any
    stretch_tiles: Any

    @classmethod
    def of(cls, flat: Any, sizes: PrefillSizes) -> Parts:
        return cls(*[flat[first:end] for first, end in pairwise(sizes.offsets())])


def write_metadata(
    flat: Metadata,
    windows: Sequence[Window],
    sizes: PrefillSizes,
    *,
    rows: int,  # of a tile
    spare: int,  # row of the block tables that no request has
) -> None:
    """The rest of each part is padding."""
    parts = Parts.of(flat, sizes)
    by_axis = parts.positions.reshape(sizes.axes, -1)
    start = 0
    for window in windows:
        end = start + len(window.tokens)
        parts.tokens[start:end] = window.tokens
        parts.slots[start:end] = window.slots
        by_axis[:, start:end] = window.positions
        start = end
    parts.tokens[start:] = 0
    parts.slots[start:] = -1
    by_axis[:, start:] = 0  # a model of Transformers may look them up in a table
    _fill(parts.table_rows, [window.row for window in windows], spare)
    _fill(parts.seq_lens, [window.seq_len for window in windows], 0)
    parts.starts[0] = 0
    _fill(parts.starts[1:], np.cumsum([len(window.tokens) for window in windows]), start)
    samples = [i for i, window in enumerate(windows) if window.samples]
    _fill(parts.last, parts.starts[1:][samples] - 1, 0)
    _fill(parts.request_rows, parts.table_rows[samples], spare)
    _write_tiles(parts.tiles.reshape(-1, 2), windows, rows)
    if sizes.pieces:
        _write_pieces(parts, windows)
    if sizes.expanded:
        _write_contexts(parts, windows)
    if sizes.stretches:
        _write_stretches(parts, stretches_of(windows, sizes.tokens), sizes)


def _fill(target: Metadata, values: Sequence[int] | npt.NDArray[np.integer[Any]], padding: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = padding


def _write_pieces(parts: Parts, windows: Sequence[Window]) -> None:
    """Where each piece begins, its state's row (-1: unused) and the row of its checkpoint (-1: none)."""
    pieces = [(length, window.row, checkpoint) for window in windows for length, checkpoint in window.pieces]
    lengths = [length for length, _, _ in pieces]
    parts.piece_starts[0] = 0
    _fill(parts.piece_starts[1:], np.cumsum(lengths), sum(lengths))
    _fill(parts.piece_rows, [row for _, row, _ in pieces], -1)
    _fill(parts.keep, [checkpoint for _, _, checkpoint in pieces], -1)


def is_crossing(windows: Sequence[Window]) -> bool:
    return any(stretch.keys for window in windows for stretch in window.stretches)


def stretches_of(windows: Sequence[Window], tokens: int = 0) -> list[Stretch]:
    """All rows of a pass of so many tokens; padding is the last stretch."""
    stretches = [one for window in windows for one in window.stretches or (Stretch(len(window.tokens)),)]
    padding = tokens - sum(stretch.tokens for stretch in stretches)
    return [*stretches, Stretch(padding)] if padding > 0 else stretches


def _write_contexts(parts: Parts, windows: Sequence[Window]) -> None:
    """Where each context begins among expanded ones, and tiles of all."""
    seq_lens = [window.seq_len for window in windows]
    parts.context_starts[0] = 0
    _fill(parts.context_starts[1:], np.cumsum(seq_lens), sum(seq_lens))
    index = parts.context_tiles.reshape(-1, 2)
    tiles = [(i, row) for i, seq_len in enumerate(seq_lens) for row in range(0, seq_len, GATHERED)]
    if tiles:
        index[: len(tiles)] = tiles
    index[len(tiles) :] = 0, _NO_ROW


def _write_tiles(index: Metadata, windows: Sequence[Window], rows: int) -> None:
    """The window and first row of each tile, the one with most keys first, as `varlen_tiles` says."""
    tiles = [
        (window.seq_len - len(window.tokens) + first, owner, first)
        for owner, window in enumerate(windows)
        for first in range(0, len(window.tokens), rows)
    ]
    tiles.sort(reverse=True)
    assert len(tiles) <= len(index), f"{len(tiles)} tiles in a launch of {len(index)}"
    if tiles:
        index[: len(tiles)] = np.array(tiles, np.int32)[:, 1:]
    index[len(tiles) :] = 0, _NO_ROW


def _write_stretches(parts: Parts, stretches: Sequence[Stretch], sizes: PrefillSizes) -> None:
    lengths = [stretch.tokens for stretch in stretches]
    counts = [stretch.states for stretch in stretches]
    parts.stretch_starts[0] = 0
    _fill(parts.stretch_starts[1:], np.cumsum(lengths), sizes.tokens)
    _fill(parts.stretch_counts, counts, 0)
    parts.is_crossing[:] = np.repeat(np.array(counts, np.int32) > 0, lengths)
    tiles = [(i, row) for i, n in enumerate(lengths) for row in range(0, n, sizes.stretch_rows)]
    index = parts.stretch_tiles.reshape(-1, 2)
    index[: len(tiles)] = tiles
    index[len(tiles) :] = 0, _NO_ROW
