"""Mixed batches on a CUDA device: prefill chunk and decode step in one pass, which reads the weights once.

    rows of a pass    | prefill tokens ... padding | one token a request ... padding |
    GEMMs             | ......................... all rows ......................... |
    attention         | prefill kernel             | decode kernel                   |  concurrent

The attention kernels share the SMs. Each pair of sizes is a CUDA graph. No prompt ends in such a pass: its
first token would wait for the decode step. Knows neither requests nor plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.models.cuda.decoder import Mixer, Mixers
from saccade.models.cuda.residual import Residual
from saccade.runner.cuda.decode_graphs import Decoded, DecodeGraphs, DecodeRows
from saccade.runner.cuda.graph_capture import capture
from saccade.runner.cuda.graph_sizes import GRAPH_WINDOWS, MAX_MIXED_ROWS, MixedSize, mixed_sizes
from saccade.runner.cuda.prefill_graphs import PrefillGraphs, Splice
from saccade.runner.cuda.prefill_metadata import PrefillSizes, Window
from saccade.runner.cuda.staging import PinnedStaging


class _Prepared(NamedTuple):
    sizes: PrefillSizes  # of the prefill metadata
    metadata: Tensor  # int32, laid out by `sizes`
    graph: torch.cuda.CUDAGraph | None  # None: launched kernel by kernel


class MixedGraphs:
    def __init__(self, prefill: PrefillGraphs, decode: DecodeGraphs) -> None:
        self._prefill = prefill
        self._decode = decode
        self._decoder = prefill.decoder
        table = self._decoder.decoder.table
        self._embeds = table.new_zeros(MAX_MIXED_ROWS, prefill.width)
        self._staging = PinnedStaging(
            prefill.graph_sizes(MAX_MIXED_ROWS, optional=True).offsets()[-1], table.device
        )
        self._prepared: dict[MixedSize, _Prepared] = {}
        self._side: torch.cuda.Stream | None = None
        if table.is_cuda:
            self._side = torch.cuda.Stream(table.device)  # type: ignore[no-untyped-call]

    def fitting(self, tokens: int, windows: int, rows: int) -> MixedSize | None:
        """The smallest size that holds these, if any does."""
        if windows > GRAPH_WINDOWS:
            return None
        fitting = [size for size in self._prepared if size.tokens >= tokens and size.rows >= rows]
        return min(fitting, key=lambda size: (sum(size), size.rows), default=None)

    def sizes(self) -> list[MixedSize]:
        return sorted(self._prepared)

    def run(
        self, size: MixedSize, windows: Sequence[Window], splice: Splice | None, rows: DecodeRows
    ) -> Decoded:
        """The most likely next token of each of `rows`. No window samples."""
        assert not any(window.samples for window in windows)
        prepared = self._prepared[size]
        self._prefill.write(self._staging.open(), windows, prepared.sizes)
        self._staging.send(prepared.metadata)
        self._prefill.kinds.begin_pass(windows)
        self._decode.send(rows, size.rows)
        if splice is not None:
            splice(self._embeds)
        if prepared.graph is None:
            self._forward(size, prepared)
        else:
            prepared.graph.replay()
        return self._decode.decoded(len(rows.tokens))

    def prepare(self, size: MixedSize) -> _Prepared:
        """Allocate what passes of this size need."""
        sizes = self._prefill.graph_sizes(size.tokens, optional=True)
        prepared = _Prepared(sizes, self._prefill.new_metadata((), sizes), None)
        self._prepared[size] = prepared
        return prepared

    def capture(self, pool: Any, max_tokens: int) -> None:
        """Graphs for all sizes, in the memory of the larger ones captured before. `max_tokens`: of a step."""
        nothing = DecodeRows(*[torch.empty(0, dtype=torch.int32).numpy()] * len(DecodeRows._fields))
        for size in mixed_sizes(max_tokens, self._decode.sizes[-1]):
            prepared = self.prepare(size)
            self._decode.send(nothing, size.rows)
            graph = capture(partial(self._forward, size, prepared), pool)
            self._prepared[size] = prepared._replace(graph=graph)

    def _forward(self, size: MixedSize, prepared: _Prepared) -> None:
        first = size.tokens
        embeds = self._embeds[: sum(size)]
        half = self._prefill.attention.half(size.tokens)
        prefill = self._prefill.begin(embeds[:first], prepared.metadata, prepared.sizes, half.splits)
        decode = self._decode.begin(size.rows, embeds[first:], half.programs, has_images=True)
        gemms = self._decoder.gemms(len(embeds))
        decode_mixers = self._decode.kinds.decode(decode)
        prefill_mixers = self._prefill.kinds.prefill(prefill)
        both = {
            layer: self._both(first, mixer, decode_mixers[layer]) for layer, mixer in prefill_mixers.items()
        }
        before = self._prefill.positions(prepared.metadata, prepared.sizes)
        after = self._decode.positions(size.rows)[None].expand(len(before), -1)
        mixers = Mixers(both, torch.cat((before, after), 1))
        x = self._decoder.forward(embeds, mixers, gemms)
        added = x.added if x.added is None else x.added[..., first:, :].contiguous()
        self._decode.finish(Residual(x.rows[first:], added, x.how), gemms, size.rows)

    def _both(self, first: int, prefill: Mixer, decode: Mixer) -> Mixer:
        """What mixes both parts of a pass: rows before `first` are prefill."""

        def mix(projected: Tensor, module: Any, index: int, out: Tensor | None = None) -> Tensor:
            if out is None:
                out = projected.new_empty(len(projected), module.out.inputs)
            self._concurrently(
                lambda: prefill.mix(projected[:first], module, index, out[:first]),
                lambda: decode.mix(projected[first:], module, index, out[first:]),
            )
            return out

        rows = None
        if prefill.rows is not None and decode.rows is not None:
            rows = torch.cat((prefill.rows, decode.rows))
        return Mixer(mix, rows)

    def _concurrently(self, here: Callable[[], object], there: Callable[[], object]) -> None:
        """Fork to a side stream and join: both start after earlier kernels and end before later ones."""
        if self._side is None:
            here()
            there()
            return
        stream = torch.cuda.current_stream()
        self._side.wait_stream(stream)
        here()
        with torch.cuda.stream(self._side):
            there()
        stream.wait_stream(self._side)
