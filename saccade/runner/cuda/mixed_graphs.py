"""Prompt tokens that ride along with a decode step on a CUDA device: one pass, which reads the weights once for both.

    rows of a pass    | tokens of prompts ... padding | one token a request ... padding |
    products          | ........................... all rows .......................... |
    attention         | as in a pass of prompts       |
                      | as in a decode step           |      at the same time, each on its share of the multiprocessors

Each size of both parts is a recorded graph. No prompt ends in such a pass: whoever waits for its first token would wait
for the decode step as well. Knows neither requests nor plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.models.cuda.gemms import Residual
from saccade.runner.cuda.decode_graphs import Decoded, DecodeGraphs, DecodeRows
from saccade.runner.cuda.graph_sizes import GRAPH_WINDOWS, MAX_MIXED_ROWS, MixedSize, mixed_sizes
from saccade.runner.cuda.prefill_graphs import PrefillGraphs, Sizes, Splice, Window
from saccade.runner.cuda.staging import PinnedStaging


class _Prepared(NamedTuple):
    sizes: Sizes  # of the prompts' numbers
    metadata: Tensor  # int32, laid out by `sizes`
    graph: torch.cuda.CUDAGraph | None  # None: launched one kernel at a time


class MixedGraphs:
    def __init__(self, prompts: PrefillGraphs, decoding: DecodeGraphs) -> None:
        self._prompts, self._decoding, self._decoder = prompts, decoding, prompts.decoder
        table = self._decoder.decoder.table
        self._embeds = table.new_zeros(MAX_MIXED_ROWS, prompts.width)
        self._mailbox = PinnedStaging(prompts.graph_sizes(MAX_MIXED_ROWS).offsets()[-1], table.device)
        self._prepared: dict[MixedSize, _Prepared] = {}
        self._side = torch.cuda.Stream(table.device) if table.is_cuda else None  # type: ignore[no-untyped-call]

    def fitting(self, tokens: int, windows: int, rows: int) -> MixedSize | None:
        """The smallest size that holds these, if any does."""
        fitting = [size for size in self._prepared if size.tokens >= tokens and size.rows >= rows]
        is_small = windows <= GRAPH_WINDOWS
        return min(fitting, key=lambda size: (sum(size), size.rows), default=None) if is_small else None

    def sizes(self) -> list[MixedSize]:
        return sorted(self._prepared)

    def run(self, size: MixedSize, windows: Sequence[Window], splice: Splice | None, rows: DecodeRows) -> Decoded:
        """The likeliest next token of each of `rows`, as a decode step finds it. No window samples."""
        assert not any(window.samples for window in windows)
        prepared = self._prepared[size]
        self._prompts.write(self._mailbox.open(), windows, prepared.sizes)
        self._mailbox.send(prepared.metadata)
        self._decoding.send(rows, size.rows)
        if splice is not None:
            splice(self._embeds)
        if prepared.graph is None:
            self._forward(size, prepared)
        else:
            prepared.graph.replay()
        return self._decoding.found(len(rows.tokens))

    def prepare(self, size: MixedSize) -> _Prepared:
        """From now on passes of this size can be run."""
        sizes = self._prompts.graph_sizes(size.tokens)
        prepared = _Prepared(sizes, self._prompts.new_metadata((), sizes), None)
        self._prepared[size] = prepared
        return prepared

    def record(self, pool: Any, max_tokens: int) -> None:
        """Graphs for all sizes, in the memory of larger ones that were recorded before. `max_tokens`: of a step."""
        nothing = DecodeRows(*[torch.empty(0, dtype=torch.int32).numpy()] * 5)
        for size in mixed_sizes(max_tokens, self._decoding.sizes[-1]):
            prepared = self.prepare(size)
            self._decoding.send(nothing, size.rows)
            self._forward(size, prepared)  # compiles the kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._forward(size, prepared)
            self._prepared[size] = prepared._replace(graph=graph)

    def _forward(self, size: MixedSize, prepared: _Prepared) -> None:
        first, embeds, half = size.tokens, self._embeds[: sum(size)], self._prompts.attention.half(size.tokens)
        of_prompts = self._prompts.begin(embeds[:first], prepared.metadata, prepared.sizes, half.splits)
        _, of_answers = self._decoding.begin(size.rows, embeds[first:], half.programs)
        gemms = self._decoder.gemms(len(embeds))

        def attend(qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            out = torch.empty_like(self._decoder.split(qkv)[0], memory_format=torch.contiguous_format)
            self._side_by_side(
                lambda: of_prompts(qkv[:first], keys, values, out[:first]),
                lambda: of_answers(qkv[first:], keys, values, out[first:]),
            )
            return out

        x = self._decoder.forward(embeds, attend, gemms)
        added = x.added if x.added is None else x.added[..., first:, :].contiguous()
        self._decoding.finish(Residual(x.rows[first:], added), gemms, size.rows)

    def _side_by_side(self, here: Callable[[], object], there: Callable[[], object]) -> None:
        """Both begin when what was launched before has ended, and end before what is launched next begins."""
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
