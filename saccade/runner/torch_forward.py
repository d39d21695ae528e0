"""The forward pass in PyTorch: all windows of a step as one batch. The reference, and the path on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from saccade import costs
from saccade.models.interface import CrossAttentionModel, RecurrentModel, VisionLanguageModel
from saccade.models.layers.torch_attention import PagedAttention, PagedKV
from saccade.runner.batch import Batch, RequestState, build_batch, overlapping, splice
from saccade.runner.cross_attention_metadata import rows_by_image
from saccade.runner.forward import Embeddings, Sampled, Windows
from saccade.runner.pooling import keep_rows, needs_rows, sample_or_pool
from saccade.runner.recurrent_state import RecurrentStates
from saccade.sampling_params import SamplingParams
from saccade.types.latency import LatencyProfile
from saccade.types.media import Grid
from saccade.types.prompt import Prompt
from saccade.types.request import Request
from saccade.types.step import Admission, Sample, ScheduledWindow


class TorchForward:
    is_async = False

    def __init__(
        self, model: VisionLanguageModel, kv: PagedKV, block_size: int, states: RecurrentStates | None = None
    ) -> None:
        self.model = model
        self.kv = kv
        self.block_size = block_size
        self.recurrent = states  # None: the model has no recurrent layers
        self._new_blocks: list[int] = []  # the last one of each request, since the latest pass

    def open(self, admission: Admission) -> None:
        if self.recurrent:
            self.recurrent.open(admission.request.request_id, admission.state)

    def extend(self, request_id: str, count: int, blocks: Sequence[int]) -> None:
        self._new_blocks.append(blocks[-1])

    def close(self, request_id: str) -> None:
        if self.recurrent:
            self.recurrent.close(request_id)

    def clear(self) -> None:
        self._new_blocks.clear()
        if self.recurrent:
            self.recurrent.clear()

    def step(self, decode: Windows, encode: Callable[[], Windows], embeddings: Embeddings) -> Sampled:
        return self._pass([*decode, *encode()], embeddings)

    def mixed(self, prefill: Windows, embeddings: Embeddings, decode: Windows) -> Sampled:
        return self._pass([*decode, *prefill], embeddings)

    def measure(
        self, model: VisionLanguageModel, largest: Grid | None, ceiling_ms: float | None
    ) -> LatencyProfile | None:
        return None

    @torch.inference_mode()
    def seconds_per_prompt_token(self, tokens: int = 128) -> float:
        """Measured on KV blocks; call it before any request is admitted."""
        tokens = min(tokens, self.kv.k.shape[1])
        admission = self._scratch_admission(tokens)
        windows = [(ScheduledWindow("scratch", 0, tokens, (), False), RequestState(admission))]
        times = []
        for _ in range(3):
            start = time.perf_counter()
            self.open(admission)
            self._pass(windows, {})
            self.close("scratch")
            if self.kv.k.is_cuda:
                torch.cuda.synchronize(self.kv.k.device)
            times.append(time.perf_counter() - start)
        return min(times) / tokens

    def _pass(self, windows: Windows, embeddings: Embeddings) -> Sampled:
        if self._new_blocks:  # attention reads whole blocks, also beyond the context
            self.kv.clear(self._new_blocks, self.block_size)
            self._new_blocks = []
        if not windows:
            return dict
        states = [state for _, state in windows]
        batch = build_batch([window for window, _ in windows], states, self.block_size, self.kv.k.device)
        hidden = self._forward(batch, windows, embeddings)
        if needs_rows(windows):
            keep_rows(windows, hidden, self.model.decoder, self.model.logits)
        samples = self._sample(batch, windows, hidden)
        return lambda: samples

    def logits(self, windows: Windows, embeddings: Embeddings) -> Tensor:
        """Of windows that sample: [samples, vocabulary]."""
        states = [state for _, state in windows]
        batch = build_batch([window for window, _ in windows], states, self.block_size, self.kv.k.device)
        return self.model.logits(self._forward(batch, windows, embeddings)[batch.last_rows])

    def _forward(self, batch: Batch, windows: Windows, embeddings: Embeddings) -> Tensor:
        embeds = self.model.embed(batch.token_ids)  # [T, H]
        _splice(embeds, windows, embeddings)
        attention = PagedAttention(self.kv, batch.attention, self.model.decoder.scale)
        with_spans = [(window, state.spans) for window, state in windows]
        if rows := rows_by_image(with_spans, embeddings, embeds.device):
            return cast(CrossAttentionModel, self.model).forward(embeds, batch.positions, attention, rows)
        if self.recurrent is None:
            return self.model.forward(embeds, batch.positions, attention)
        states = self.recurrent.of([window for window, _ in windows])
        return cast(RecurrentModel, self.model).forward(embeds, batch.positions, attention, states)

    def _sample(self, batch: Batch, windows: Windows, hidden: Tensor) -> dict[str, Sample]:
        sampling = [state for window, state in windows if window.samples]
        if not sampling:
            return {}
        last = hidden[batch.last_rows]  # [samples, H]
        return sample_or_pool(self.model.logits(last), last, sampling)

    def _scratch_admission(self, tokens: int) -> Admission:
        axes = 3 if self.model.config.text.mrope_section else 1
        positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), (axes, tokens))
        prompt = Prompt([0] * tokens, (), (), positions, tokens, b"")
        request = Request("scratch", prompt, SamplingParams(), 1, frozenset(), 0)
        return Admission(request, (), tuple(range(costs.blocks_for(tokens, self.block_size))))


def _splice(embeds: Tensor, windows: Windows, embeddings: Embeddings) -> None:
    row = 0
    for window, state in windows:
        if window.start < state.num_prompt:
            inside = overlapping(state.spans, window.start, window.end)
            for span in (span for span in inside if span.is_spliced):
                splice(embeds, row, window, span, embeddings[span.key])
        row += window.end - window.start
