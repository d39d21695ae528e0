"""Computes a step's windows on a CUDA device without waiting for it: launch now, ask for the tokens later.

Requests that decode go through one graph, prompts through another pass: each has the shapes it is fast at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.models.attention import PagedKV
from saccade.models.decoder import Decoder
from saccade.models.fused import FusedDecoder
from saccade.models.interface import VisionLanguageModel
from saccade.runner.batch import RequestState, overlapping, slots_of, splice
from saccade.runner.decoding import DecodePass, DecodeRow
from saccade.runner.device import Sampled, Windows
from saccade.runner.measure import layer_curve, timed_curve
from saccade.runner.prompts import PromptPass, Window
from saccade.runner.sampler import sample
from saccade.runner.tables import BlockTables, to_device
from saccade.types import Grid, Key, Pace, Sample, Work

_MEASURED_CONTEXT = 1024  # tokens behind each request whose decoding is timed


class _Picked(NamedTuple):
    """Rows that sample: the likeliest tokens, on their way to the host, and the logits for those that want more."""

    states: list[RequestState]
    tokens: Tensor  # int64, pinned
    logits: Tensor  # [rows, vocabulary], on the device


class CudaForward:
    def __init__(
        self, decoder: Decoder, kv: PagedKV, *, block_size: int, max_requests: int, max_blocks: int, axes: int
    ) -> None:
        self.block_size = block_size
        self.device = kv.k.device
        self._tables = BlockTables(max_requests, max_blocks, self.device)
        self.open, self.extend = self._tables.open, self._tables.extend
        self.close, self.clear = self._tables.close, self._tables.clear
        self._decoder = FusedDecoder(decoder, kv)
        self._latest: dict[str, int] = {}  # row of each request in the run of the decode pass before
        self._decoding = DecodePass(self._decoder, self._tables, block_size, max_requests)
        self._prompts = PromptPass(self._decoder, self._tables, block_size, axes)

    @torch.inference_mode()
    def record(self, max_tokens: int) -> None:
        """Compile every kernel and record every graph: nothing of it is left for the first request to wait for."""
        pool = torch.cuda.graph_pool_handle()
        table = self._decoder.decoder.table
        self._prompts.record(pool, table.shape[1], table.dtype, max_tokens)
        self._decoding.record(pool)
        torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def measure(self, model: VisionLanguageModel, largest: Grid | None, target_ms: float | None) -> Pace:
        decode, prompts = timed_curve(self._decode_trials()), timed_curve(self._prompt_trials())
        return Pace(decode, prompts, layer_curve(model, largest), target_ms)

    def _decode_trials(self) -> Iterator[tuple[int, Callable[[], object]]]:
        """A run of each recorded size."""
        longest = self._tables.blocks.shape[1] * self.block_size
        row = DecodeRow(0, 0, -1, min(_MEASURED_CONTEXT, longest), 0)
        for size in self._decoding.sizes:
            yield size, partial(self._decoding.run, [row] * size)

    def _prompt_trials(self) -> Iterator[tuple[int, Callable[[], object]]]:
        """The same for prompts: one window at the beginning of a context, stored nowhere."""
        longest = self._tables.blocks.shape[1] * self.block_size
        table = self._decoder.decoder.table
        for tokens in self._prompts.recorded_sizes():
            if tokens <= longest:
                slots = np.full(tokens, -1)
                window = Window(0, np.zeros((self._prompts.axes, tokens), np.int64), slots, tokens)
                yield tokens, partial(self._prompts.run, table.new_zeros(tokens, table.shape[1]), [window])

    def decode(self, windows: Windows) -> Sampled:
        self._tables.flush()
        rows = [self._row(work, state) for work, state in windows]
        self._latest = {work.request_id: index for index, (work, _) in enumerate(windows)}
        decoded = self._decoding.run(rows)
        return self._collecting(_Picked([s for _, s in windows], self._to_host(decoded.tokens), decoded.logits))

    def prompts(self, windows: Windows, embeddings: Mapping[Key, Tensor]) -> Sampled:
        self._tables.flush()
        tokens = np.concatenate([state.tokens(work.start, work.end) for work, state in windows])
        embeds = self._decoder.embed(to_device(tokens, self.device))
        _splice(embeds, windows, embeddings)
        hidden = self._prompts.run(embeds, [self._window(work, state) for work, state in windows])
        ends = np.cumsum([work.end - work.start for work, _ in windows]) - 1
        last = [(end, state) for end, (work, state) in zip(ends.tolist(), windows, strict=True) if work.samples]
        if not last:
            return dict
        rows = to_device(np.array([end for end, _ in last]), self.device)
        logits = self._decoder.logits(hidden.index_select(0, rows))
        return self._collecting(_Picked([s for _, s in last], self._to_host(logits.argmax(-1)), logits))

    def _row(self, work: Work, state: RequestState) -> DecodeRow:
        place, request_id = work.start, work.request_id
        block, offset = divmod(place, self.block_size)
        return DecodeRow(
            state.last_token if place < state.num_tokens else -1 - self._latest[request_id],
            place - state.num_prompt + state.next_position,
            state.blocks[block] * self.block_size + offset,
            place + 1,
            self._tables.row(request_id),
        )

    def _window(self, work: Work, state: RequestState) -> Window:
        return Window(
            self._tables.row(work.request_id),
            state.positions(work.start, work.end),
            slots_of(work, np.array(state.blocks), self.block_size),
            work.end,
        )

    def _to_host(self, tokens: Tensor) -> Tensor:
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=self.device.type == "cuda")
        return host.copy_(tokens, non_blocking=True)

    def _collecting(self, picked: _Picked) -> Sampled:
        if self.device.type != "cuda":  # kernels in Triton's interpreter: everything is done already
            return lambda: _samples(picked)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()

        def collect() -> dict[str, Sample]:
            done.synchronize()
            return _samples(picked)

        return collect


def _samples(picked: _Picked) -> dict[str, Sample]:
    """Greedy rows have their token already; the others are drawn from their logits, on the device."""
    found = [Sample(token, None) for token in picked.tokens.tolist()]
    special = [i for i, state in enumerate(picked.states) if not state.is_plain]
    if special:
        logits = picked.logits[torch.tensor(special, device=picked.logits.device)].float()
        for i, drawn in zip(special, sample(logits, [picked.states[i].row() for i in special]), strict=True):
            found[i] = drawn
    pairs = zip(picked.states, found, strict=True)
    return {state.request.request_id: state.take(chosen) for state, chosen in pairs}


def _splice(embeds: Tensor, windows: Windows, embeddings: Mapping[Key, Tensor]) -> None:
    row = 0
    for work, state in windows:
        if work.start < state.num_prompt:
            for span in overlapping(state.spans, work.start, work.end):
                splice(embeds, row, work, span, embeddings[span.key])
        row += work.end - work.start
