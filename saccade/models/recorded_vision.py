"""Blocks of a vision tower as recorded launches: for passes that the device runs faster than a host launches them.

A recording reads what lies where it lay then. A pass copies its own there before its first block:

    x [most patches, hidden]   | the pass ....... | rows of nobody: computed, never read |
    cos, sin                   | the pass ....... | ..                                   |
    starts, index              | its pictures, then empty ones | its tiles, then some that do nothing |

Passes may take turns, block by block. Nobody else may hold what a block returns when the next pass begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.kernels.tiles import Tiles
from saccade.models.vision import Angles, VisionBlock
from saccade.models.vision_ops import RunBlock

SIZES = tuple(range(128, 2049, 128))  # patches; matrix products work in tiles of 128 rows anyway
PICTURES = 32  # of a pass, or windows

Make = Callable[[Angles | None, Tiles], RunBlock]
"""A pass of single launches."""
Replay = Callable[[], object]


@dataclass(eq=False)
class _Fixed:
    """What all recordings read."""

    x: Tensor
    angles: Angles | None
    starts: Tensor
    index: Tensor

    @classmethod
    @torch.inference_mode(False)  # tensors that everybody may write, in whatever mode
    def like(cls, x: Tensor, angles: Angles | None, rows: int) -> _Fixed:
        def most(tensor: Tensor) -> Tensor:
            return torch.zeros(SIZES[-1], *tensor.shape[1:], dtype=tensor.dtype, device=x.device)

        numbers = torch.zeros(PICTURES + 1 + 2 * num_tiles(SIZES[-1], rows), dtype=torch.int32, device=x.device)
        fixed = Angles(most(angles.cos), most(angles.sin)) if angles else None
        return cls(most(x), fixed, numbers[: PICTURES + 1], numbers[PICTURES + 1 :].view(-1, 2))

    def takes(self, x: Tensor, angles: Angles | None) -> bool:
        is_like = (angles is None) == (self.angles is None)
        return is_like and self.x.shape[1] == x.shape[1] and self.x.dtype == x.dtype


class Recordings:
    """Of every block, for every size. They are made while `recording`; whatever has none is launched as ever."""

    def __init__(self, make: Make, rows: int) -> None:
        self.make = make
        self.rows = rows  # of a tile
        self._fixed: _Fixed | None = None
        self._replays: dict[tuple[int, VisionBlock], Replay] = {}
        self._is_recording = False
        self._stream: torch.cuda.Stream | None = None  # one for all: libraries keep working memory per stream
        self._pool: Any = None
        self._holder: _RecordedPass | None = None  # whose angles and tiles are in place

    def fit(self, lengths: Sequence[int]) -> bool:
        if not self._replays and not self._is_recording:
            return False
        return len(lengths) <= PICTURES and sum(lengths) <= SIZES[-1]

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording, self._holder = False, None

    def begin(self, lengths: Sequence[int], angles: Angles | None, device: torch.device) -> RunBlock:
        return _RecordedPass(self, lengths, angles, device)

    def replay(self, of: _RecordedPass, block: VisionBlock, x: Tensor) -> Tensor | None:
        """None: there is no recording of this block."""
        if self._is_recording and self._fixed is None:
            self._fixed = _Fixed.like(x, of.angles, self.rows)
        fixed, key = self._fixed, (of.size, block)
        if fixed is None or not fixed.takes(x, of.angles):
            return None
        if key not in self._replays and not self._is_recording:
            return None
        self._put_in_place(fixed, of, x)
        if key not in self._replays:
            self._replays[key] = self._record(fixed, of.size, block)
        self._replays[key]()
        return fixed.x[: len(x)]

    def _put_in_place(self, fixed: _Fixed, of: _RecordedPass, x: Tensor) -> None:
        if x.data_ptr() != fixed.x.data_ptr():
            fixed.x[: len(x)] = x
        if self._holder is of:
            return
        self._holder = of
        fixed.starts.copy_(of.tiles.starts)
        fixed.index[: len(of.tiles.index)] = of.tiles.index
        if fixed.angles is not None and of.angles is not None:
            fixed.angles.cos[: len(x)] = of.angles.cos
            fixed.angles.sin[: len(x)] = of.angles.sin

    def _record(self, fixed: _Fixed, size: int, block: VisionBlock) -> Replay:
        angles = Angles(*(part[:size] for part in fixed.angles)) if fixed.angles else None
        run = self.make(angles, Tiles(fixed.starts, fixed.index[: num_tiles(size, self.rows)], self.rows))
        x = fixed.x[:size]
        run(block, x)  # compiles the kernels
        if x.device.type != "cuda":
            return lambda: run(block, x)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._stream = self._stream or torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
        return _captured(lambda: run(block, x), self._pool, self._stream)


class _RecordedPass:
    def __init__(
        self, recordings: Recordings, lengths: Sequence[int], angles: Angles | None, device: torch.device
    ) -> None:
        self.size = next(size for size in SIZES if size >= sum(lengths))
        self.angles = angles
        capacity = num_tiles(self.size, recordings.rows)
        empty = [0] * (PICTURES - len(lengths))
        self.tiles = Tiles.of([*lengths, *empty], recordings.rows, device, capacity=capacity)
        self._recordings = recordings
        self._plain: RunBlock | None = None

    def __call__(self, block: VisionBlock, x: Tensor) -> Tensor:
        found = self._recordings.replay(self, block, x)
        if found is not None:
            return found
        self._plain = self._plain or self._recordings.make(self.angles, self.tiles)
        return self._plain(block, x)


def num_tiles(size: int, rows: int) -> int:
    """Most that so many patches are cut into, whatever pictures they are of."""
    return size // rows + PICTURES


def _captured(run: Callable[[], object], pool: Any, stream: torch.cuda.Stream) -> Replay:
    """Without the collection of garbage that `torch.cuda.graph` begins with: there are hundreds to record."""
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool)
        try:
            run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    replay: Replay = graph.replay
    return replay
