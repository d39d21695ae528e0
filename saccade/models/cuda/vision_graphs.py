"""Blocks of a vision tower as recorded launches: for passes that the device runs faster than a host launches them.

A recording is of a few blocks over so many patches, and reads what lies where it lay then. A pass copies its own there
before its first block:

    x [most patches, hidden]   | the pass ....... | rows of nobody: computed, never read |
    numbers, in one copy       | where its pictures are, for attention | cells |
    turns                      made of the cells where they lie

Passes may take turns at every pause. Nobody else may hold what a block returns when the next pass begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.kernels.ops import vit_elementwise
from saccade.models.cuda.vision_attention import Attend, AttentionPath, Heads, PassLimits
from saccade.models.cuda.vision_sizes import IMAGES, size_for
from saccade.models.vision.blocks import PatchPositions, VisionBlock
from saccade.models.vision.ops import Blocks, RunBlocks

TOGETHER = 4  # blocks of a recording: a pause behind each would cost a graph and a launch, and is as short as a decode

Make = Callable[[Tensor | None, Attend], Callable[[VisionBlock, Tensor], Tensor]]
"""Single launches, over what lies in a fixed place."""
Begin = Callable[[Sequence[int], PatchPositions | None, torch.device], RunBlocks]
Replay = Callable[[], object]


class _Recorded(NamedTuple):
    blocks: int  # how many
    replay: Replay


@dataclass(eq=False)
class _StaticBuffers:
    """What all recordings read."""

    x: Tensor
    rotary: Tensor | None  # float32 [most patches, d]
    metadata: Tensor  # int32: of attention, then cells

    @classmethod
    @torch.inference_mode(False)  # tensors that everybody may write, in whatever mode
    def like(cls, x: Tensor, places: PatchPositions | None, size: int, room: int) -> _StaticBuffers:
        """For so many patches, and numbers of attention."""

        def maximum(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, columns, dtype=dtype, device=x.device)

        metadata = torch.zeros(room + size, dtype=torch.int32, device=x.device)
        dim = 4 * places.per_axis.shape[-1] if places else 0
        rotary = maximum(dim, torch.float32) if places else None
        return cls(maximum(x.shape[1], x.dtype), rotary, metadata)

    def takes(self, x: Tensor, places: PatchPositions | None, size: int, room: int) -> bool:
        is_like = (places is None) == (self.rotary is None) and self.x.dtype == x.dtype
        has_room = len(self.x) >= size and len(self.metadata) >= room + size
        return is_like and has_room and self.x.shape[1] == x.shape[1]

    def rotary_for(self, size: int) -> Tensor | None:
        return self.rotary[:size] if self.rotary is not None else None

    def rotate_one(self, places: PatchPositions, at: int) -> None:
        """By the cells that lie there."""
        patches = len(places.cells)
        rotary = self.rotary_for(patches)
        assert rotary is not None
        vit_elementwise.rotate_one(self.metadata[at : at + patches], places.per_axis, rotary)


class VisionGraphs:
    """Of all blocks, for many sizes, made while `recording`, the largest first. Other passes are launched as ever."""

    def __init__(self, make: Make, ways: Sequence[AttentionPath], launched: Begin) -> None:
        """A pass goes the first way that suits it."""
        self.make = make
        self.ways = ways
        self.launched = launched
        self._fixed: _StaticBuffers | None = None
        self._recorded: dict[tuple[int, AttentionPath, VisionBlock], _Recorded] = {}  # by size and first block
        self._sizes: set[int] = set()
        self._is_recording = False
        self._pool: Any = None
        self._holder: _RecordedPass | None = None  # whose numbers are in place

    def fit(self, lengths: Sequence[int]) -> bool:
        return len(lengths) <= IMAGES and (self._is_recording or size_for(sum(lengths)) in self._sizes)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording, self._holder = False, None

    def begin(self, lengths: Sequence[int], places: PatchPositions | None, device: torch.device) -> RunBlocks:
        return _RecordedPass(self, lengths, places, device)

    def replay(self, of: _RecordedPass, blocks: Blocks, x: Tensor) -> tuple[Tensor, int] | None:
        """None: there is no recording that begins with these blocks."""
        heads, maximum = _heads(blocks[0], x), PassLimits(of.size, IMAGES)
        if self._is_recording and self._fixed is None:
            self._fixed = _StaticBuffers.like(x, of.places, of.size, max(way.room(heads, maximum) for way in self.ways))
        way = next(way for way in self.ways if way.suits(of.lengths, heads, of.size))
        fixed, key, room = self._fixed, (of.size, way, blocks[0]), way.room(heads, maximum)
        if fixed is None or not fixed.takes(x, of.places, of.size, room):
            return None
        if key not in self._recorded and not self._is_recording:
            return None
        self._put_in_place(fixed, of, x, way, heads)
        if key not in self._recorded:
            attend = way.attend(fixed.metadata[:room], maximum)
            self._recorded[key] = self._record(fixed, of.size, blocks[:TOGETHER], attend)
            self._sizes.add(of.size)
        recorded = self._recorded[key]
        assert recorded.blocks <= len(blocks), "a tower cuts its blocks as it did when they were recorded"
        recorded.replay()
        return fixed.x[: len(x)], recorded.blocks

    def _put_in_place(
        self, fixed: _StaticBuffers, of: _RecordedPass, x: Tensor, way: AttentionPath, heads: Heads
    ) -> None:
        if x.data_ptr() != fixed.x.data_ptr():
            fixed.x[: len(x)] = x
        if self._holder is not None and self._holder.is_like(of):
            return
        before, self._holder = self._holder, None  # nobody's, should what follows fail
        metadata = of.metadata(way, heads, x.is_cuda)
        fixed.metadata[: len(metadata)].copy_(metadata, non_blocking=True)
        if of.places is not None and (before is None or not of.places.are(before.places)):
            fixed.rotate_one(of.places, way.room(heads, PassLimits(of.size, IMAGES)))
        self._holder = of

    def _record(self, fixed: _StaticBuffers, size: int, blocks: Blocks, attend: Attend) -> _Recorded:
        run, x = self.make(fixed.rotary_for(size), attend), fixed.x[:size]

        def run_all() -> None:
            for block in blocks:
                run(block, x)

        run_all()  # compiles the kernels
        if x.device.type != "cuda":
            return _Recorded(len(blocks), run_all)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return _Recorded(len(blocks), _captured(run_all, self._pool, x.device))


class _RecordedPass:
    def __init__(
        self, recordings: VisionGraphs, lengths: Sequence[int], places: PatchPositions | None, device: torch.device
    ) -> None:
        self.size = size_for(sum(lengths))
        self.lengths = tuple(lengths)
        self.places = places
        self._recordings = recordings
        self._metadata: Tensor | None = None
        self._launched: RunBlocks | None = None
        self._begin = partial(recordings.launched, lengths, places, device)

    def __call__(self, blocks: Blocks, x: Tensor) -> tuple[Tensor, int]:
        found = self._recordings.replay(self, blocks, x)
        if found is not None:
            return found
        self._launched = self._launched or self._begin()
        return self._launched(blocks, x)

    def is_like(self, other: _RecordedPass) -> bool:
        """Whether both have the same numbers: what lies in place for one is right for the other."""
        if self is other:
            return True
        has_places = self.places is not None and self.places.are(other.places)
        return self.lengths == other.lengths and (has_places or self.places is other.places is None)

    def metadata(self, way: AttentionPath, heads: Heads, is_cuda: bool) -> Tensor:
        """Laid out as `_StaticBuffers.metadata`, on the host. All blocks of a pass go the same way."""
        if self._metadata is None:
            maximum = PassLimits(self.size, IMAGES)
            own, room = way.metadata(self.lengths, heads, maximum), way.room(heads, maximum)
            cells = packed_cells(self.places) if self.places else torch.empty(0, dtype=torch.int32)
            self._metadata = torch.zeros(room + len(cells), dtype=torch.int32, pin_memory=is_cuda)
            self._metadata[: len(own)] = own
            self._metadata[room:] = cells
        return self._metadata


def _heads(block: VisionBlock, x: Tensor) -> Heads:
    return Heads(block.heads, block.qkv.weight.shape[0] // (3 * block.heads), x.dtype)


def packed_cells(places: PatchPositions) -> Tensor:
    """As `vit_steps.rotate_one` reads them: int32 [T], on the host."""
    return places.cells.view(torch.int32).flatten()


def _captured(run: Callable[[], object], pool: Any, device: torch.device) -> Replay:
    """Without the collection of garbage that `torch.cuda.graph` begins with: there are a hundred to record.

    On its stream all the same: libraries keep working memory for each stream.
    """
    stream = torch.cuda.graph.default_capture_stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    torch.cuda.graph.default_capture_stream = stream
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
