"""CUDA graphs of vision blocks, for passes that the GPU runs faster than a CPU launches them.

A graph is of a few blocks over so many patches, with inputs at fixed addresses. A pass copies its own there
before its first block:

    x [max patches, hidden]    | the pass ....... | padding: computed, never read |
    metadata, in one copy      | where its images are, for attention | cells |
    rotary                     cosines and sines, computed from the cells on the device

Passes may interleave after every graph. What a block returns must not be kept when the next pass begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from saccade.kernels.attention.vit import Attend, PassLimits, VisionHeads, VitKernel
from saccade.kernels.launch.compile_ahead import is_compiling, record
from saccade.kernels.ops import vit_elementwise
from saccade.models.vision.backend import Blocks, Lengths, RunBlocks
from saccade.models.vision.blocks import PatchPositions, VisionBlock
from saccade.vision_graph_sizes import IMAGES, size_for

BLOCKS_PER_GRAPH = 4  # fewer would cost more graphs and launches; four take about as long as a decode step

Make = Callable[[Tensor | None, Attend], Callable[[VisionBlock, Tensor], Tensor]]
"""Kernel launches for a block, with a fixed `rotary` and attention."""
Begin = Callable[[Sequence[int], PatchPositions | None, torch.device], RunBlocks]
Replay = Callable[[], object]


class _Graph(NamedTuple):
    blocks: int  # how many
    replay: Replay


@dataclass(eq=False)
class _StaticBuffers:
    """What all graphs read."""

    x: Tensor
    rotary: Tensor | None  # float32 [max patches, d]
    metadata: Tensor  # int32: of attention, then cells

    @classmethod
    @torch.inference_mode(False)  # tensors that may be written in and outside of inference mode
    def like(cls, x: Tensor, positions: PatchPositions | None, size: int, metadata_size: int) -> Self:
        """For so many patches, and so many elements of attention metadata."""

        def zeros(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, columns, dtype=dtype, device=x.device)

        metadata = torch.zeros(metadata_size + size, dtype=torch.int32, device=x.device)
        rotary = zeros(4 * positions.per_axis.shape[-1], torch.float32) if positions else None
        return cls(zeros(x.shape[1], x.dtype), rotary, metadata)

    def fits(self, x: Tensor, positions: PatchPositions | None, size: int, metadata_size: int) -> bool:
        shape = (self.rotary is None, self.x.dtype, self.x.shape[1])
        is_alike = shape == (positions is None, x.dtype, x.shape[1])
        return is_alike and len(self.x) >= size and len(self.metadata) >= metadata_size + size

    def rotary_for(self, size: int) -> Tensor | None:
        return self.rotary[:size] if self.rotary is not None else None

    def write_cos_sin(self, positions: PatchPositions, at: int) -> None:
        """Of the cells that lie at this element of the metadata."""
        patches = len(positions.cells)
        rotary = self.rotary_for(patches)
        assert rotary is not None
        vit_elementwise.write_cos_sin(self.metadata[at : at + patches], positions.per_axis, rotary)


class VisionGraphs:
    """Graphs of all blocks for many sizes, captured in `capturing`, the largest first. The rest is eager."""

    def __init__(self, make: Make, kernels: Sequence[VitKernel], eager: Begin) -> None:
        """A pass takes the first kernel that suits it."""
        self.make = make
        self.kernels = kernels
        self.eager = eager
        self._buffers: _StaticBuffers | None = None
        self._graphs: dict[tuple[int, VitKernel, VisionBlock], _Graph] = {}  # by size and first block
        self._sizes: set[int] = set()
        self._is_capturing = False
        self._pool: Any = None
        self._current: _GraphPass | None = None  # the pass whose inputs are in the buffers

    def fit(self, lengths: Sequence[int]) -> bool:
        return len(lengths) <= IMAGES and (self._is_capturing or size_for(sum(lengths)) in self._sizes)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False
            self._current = None

    def begin(self, lengths: Lengths, positions: PatchPositions | None, device: torch.device) -> RunBlocks:
        return _GraphPass(self, lengths, positions, device)

    def replay(self, of: _GraphPass, blocks: Blocks, x: Tensor) -> tuple[Tensor, int] | None:
        """None: there is no graph that begins with these blocks."""
        block = blocks[0]
        heads = VisionHeads(block.heads, len(block.qkv.weight) // (3 * block.heads), x.dtype)
        limits = PassLimits(of.size, IMAGES)
        if self._is_capturing and self._buffers is None:
            largest = max(kernel.metadata_size(heads, limits) for kernel in self.kernels)
            self._buffers = _StaticBuffers.like(x, of.positions, of.size, largest)
        kernel = next(kernel for kernel in self.kernels if kernel.suits(of.lengths, heads, of.size))
        buffers = self._buffers
        key = (of.size, kernel, block)
        size = kernel.metadata_size(heads, limits)
        if buffers is None or not buffers.fits(x, of.positions, of.size, size):
            return None
        if key not in self._graphs and not self._is_capturing:
            return None
        self._copy_inputs(buffers, of, x, kernel, heads)
        if key not in self._graphs:
            attend = kernel.attend(buffers.metadata[:size], limits)
            self._graphs[key] = self._capture(buffers, of.size, blocks[:BLOCKS_PER_GRAPH], attend)
            self._sizes.add(of.size)
        graph = self._graphs[key]
        assert graph.blocks <= len(blocks), "a tower cuts its blocks as it did when they were captured"
        graph.replay()
        return buffers.x[: len(x)], graph.blocks

    def _copy_inputs(
        self, buffers: _StaticBuffers, of: _GraphPass, x: Tensor, kernel: VitKernel, heads: VisionHeads
    ) -> None:
        if x.data_ptr() != buffers.x.data_ptr():
            buffers.x[: len(x)] = x
        if self._current is not None and self._current.is_like(of):
            return
        before = self._current
        self._current = None  # should what follows fail
        metadata = of.metadata(kernel, heads, x.is_cuda)
        buffers.metadata[: len(metadata)].copy_(metadata, non_blocking=True)
        if of.positions is not None and (before is None or not of.positions.are(before.positions)):
            buffers.write_cos_sin(of.positions, kernel.metadata_size(heads, PassLimits(of.size, IMAGES)))
        self._current = of

    def _capture(self, buffers: _StaticBuffers, size: int, blocks: Blocks, attend: Attend) -> _Graph:
        run = self.make(buffers.rotary_for(size), attend)
        x = buffers.x[:size]

        def run_all() -> None:
            for block in blocks[:1] if is_compiling() else blocks:
                run(block, x)

        if is_compiling():
            record(run_all)
            return _Graph(len(blocks), lambda: None)
        run_all()  # compiles the kernels
        if x.device.type != "cuda":
            return _Graph(len(blocks), run_all)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return _Graph(len(blocks), _captured(run_all, self._pool, x.device))


class _GraphPass:
    def __init__(
        self, graphs: VisionGraphs, lengths: Lengths, positions: PatchPositions | None, device: torch.device
    ) -> None:
        self.size = size_for(sum(lengths))
        self.lengths = tuple(lengths)
        self.positions = positions
        self._graphs = graphs
        self._metadata: Tensor | None = None
        self._eager: RunBlocks | None = None
        self._begin_eager = partial(graphs.eager, lengths, positions, device)

    def __call__(self, blocks: Blocks, x: Tensor) -> tuple[Tensor, int]:
        found = self._graphs.replay(self, blocks, x)
        if found is not None:
            return found
        self._eager = self._eager or self._begin_eager()
        return self._eager(blocks, x)

    def is_like(self, other: _GraphPass) -> bool:
        """Whether both have the same metadata."""
        if self is other:
            return True
        if self.lengths != other.lengths:
            return False
        if self.positions is None:
            return other.positions is None
        return self.positions.are(other.positions)

    def metadata(self, kernel: VitKernel, heads: VisionHeads, is_cuda: bool) -> Tensor:
        """Laid out as `_StaticBuffers.metadata`, on the CPU. All blocks of a pass take the same kernel."""
        if self._metadata is None:
            limits = PassLimits(self.size, IMAGES)
            own = kernel.metadata(self.lengths, heads, limits)
            size = kernel.metadata_size(heads, limits)
            cells = packed_cells(self.positions) if self.positions else torch.empty(0, dtype=torch.int32)
            self._metadata = torch.zeros(size + len(cells), dtype=torch.int32, pin_memory=is_cuda)
            self._metadata[: len(own)] = own
            self._metadata[size:] = cells
        return self._metadata


def packed_cells(positions: PatchPositions) -> Tensor:
    """As `vit_elementwise.write_cos_sin` reads them: int32 [T], on the CPU."""
    return positions.cells.view(torch.int32).flatten()


def _captured(run: Callable[[], object], pool: Any, device: torch.device) -> Replay:
    """As `torch.cuda.graph`, without the garbage collection it begins with: there are a hundred graphs.

    On its capture stream, which is set here if there is none yet: libraries keep workspace per stream.
    """
    stream = torch.cuda.graph.default_capture_stream
    stream = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
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
