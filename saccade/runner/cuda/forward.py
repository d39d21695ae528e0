"""The forward pass on a CUDA device, asynchronous: launch now, read the tokens later.

Decode and prefill are separate passes, each with the shapes it is fast at. A prefill chunk that does not end
its prompt may be fused with a decode step into a mixed batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.kernels.ops.argmax import TokenSink
from saccade.models.bridge.text_model import TextModel
from saccade.models.cuda.decoder import FusedDecoder
from saccade.models.cuda.transformers_decoder import TransformersDecoder
from saccade.models.interface import VisionLanguageModel
from saccade.models.layers.decoder import Decoder
from saccade.models.layers.torch_attention import PagedKV
from saccade.runner.batch import RequestState, embedded, overlapping, splice
from saccade.runner.cuda.block_table import BlockTables
from saccade.runner.cuda.decode_graphs import Decoded, DecodeGraphs, DecodeRows
from saccade.runner.cuda.graph_sizes import GRAPH_STRETCHES, GRAPH_WINDOWS
from saccade.runner.cuda.layer_kinds import LayerKinds
from saccade.runner.cuda.layer_pass import DecoderParts
from saccade.runner.cuda.mixed_graphs import MixedGraphs
from saccade.runner.cuda.prefill_graphs import PrefillGraphs, Splice
from saccade.runner.cuda.prefill_metadata import Window, stretches_of
from saccade.runner.cuda.sampling import has_kernel, sample_tokens
from saccade.runner.cuda.staging import Metadata, TokenReadback, to_device
from saccade.runner.embedding_cache import EmbeddingSlab
from saccade.runner.forward import Embeddings, Sampled, Windows
from saccade.runner.latency_profile import timed_curve, tower_times
from saccade.runner.pooling import keep_rows, needs_rows, sample_or_pool
from saccade.runner.recurrent_state import RecurrentStates
from saccade.runner.sampler import SamplingInputs
from saccade.types.latency import LatencyProfile
from saccade.types.media import Grid
from saccade.types.step import Admission, Sample, ScheduledWindow

_MEASURED_CONTEXT = 1024  # tokens of each request when decode is timed


class DecodeBatch:
    """Requests that sample in one pass, a row each. In most steps the same as in the last one."""

    def __init__(self, states: list[RequestState], tables: BlockTables) -> None:
        self.states = states
        self.ids = [state.request.request_id for state in states]
        self.rows = tables.rows(self.ids)  # int32 [size], of the block tables
        self.shifts = np.array([state.shift for state in states], np.int32)  # token index to rotary position
        # Rows that are not greedy: sampled by a kernel, or on the host from their logits.
        self.device_sampled = [i for i, s in enumerate(states) if s.samples_on_device and not s.is_greedy]
        self.host_sampled = [i for i, state in enumerate(states) if not state.samples_on_device]


class _Pending(NamedTuple):
    """Rows that sample: their tokens, being copied to the host, and the logits for sampling there."""

    batch: DecodeBatch
    tokens: Tensor  # int64, pinned
    logits: Tensor  # [rows, vocabulary], on the device
    hidden: Tensor | None  # [rows, H], of prefill


class CudaForward:
    is_async = True

    def __init__(
        self,
        decoder: Decoder | TextModel,
        kv: PagedKV,
        *,
        block_size: int,
        max_requests: int,
        max_blocks: int,
        axes: int,
        states: RecurrentStates | None = None,  # of decoders with gated delta nets
        slab: EmbeddingSlab | None = None,  # of decoders with cross-attention
        max_cross_states: int = 0,  # that a token attends to
    ) -> None:
        self.block_size = block_size
        self.device = kv.k.device
        self._num_blocks = kv.k.shape[1] // block_size
        self._tables = BlockTables(max_requests, max_blocks, self.device)
        self._decoder = (
            TransformersDecoder(decoder, kv) if isinstance(decoder, TextModel) else FusedDecoder(decoder, kv)
        )
        parts = DecoderParts(self._decoder, block_size, max_requests, states, slab, max_cross_states)
        self._kinds = LayerKinds(parts)
        shared = (self._decoder, self._kinds, self._tables, block_size)
        self._decode_graphs = DecodeGraphs(*shared, max_requests)
        self._prefill_graphs = PrefillGraphs(*shared, axes)
        self._mixed_graphs = MixedGraphs(self._prefill_graphs, self._decode_graphs)
        self._decoded = TokenReadback(max_requests, self.device)
        self._prefilled = TokenReadback(max_requests, self.device)
        self._last_batch = DecodeBatch([], self._tables)  # that decoded last

    @torch.inference_mode()
    def capture(self, max_tokens: int) -> None:
        """Compile every kernel and capture every CUDA graph, so that no request waits for it."""
        if isinstance(self._decoder, TransformersDecoder):
            self._check_waits()
        pool = torch.cuda.graph_pool_handle()
        self._prefill_graphs.capture(pool, max_tokens)
        self._decode_graphs.capture(pool)
        self._mixed_graphs.capture(pool, max_tokens)
        has_kernel(self.device, self._decoder.decoder.head.dtype, self._decoder.vocab_size)
        torch.cuda.synchronize(self.device)

    def _check_waits(self) -> None:
        """Raises if a pass waits for the device, which a CUDA graph cannot hold."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._decode_graphs.run(self._trial_rows(1))
        finally:
            torch.cuda.set_sync_debug_mode(before)

    @torch.inference_mode()
    def measure(
        self, model: VisionLanguageModel, largest: Grid | None, ceiling_ms: float | None
    ) -> LatencyProfile:
        self._scatter_blocks()
        run = self._decode_graphs.run
        sizes = self._decode_graphs.sizes
        mixed = {size.rows for size in self._mixed_graphs.sizes()}
        tower = tower_times(model, largest)
        return LatencyProfile(
            decode_ms=timed_curve((size, partial(run, self._trial_rows(size))) for size in sizes),
            prefill_ms=timed_curve(self._prefill_trials()),
            layer_ms=tower.layer_ms,
            ceiling_ms=ceiling_ms,
            max_prefills=GRAPH_WINDOWS,
            mixed_ms=tuple((rows, timed_curve(self._mixed_trials(rows))) for rows in sorted(mixed)),
            encoder_layers=tower.layers,
        )

    def _scatter_blocks(self) -> None:
        """Spread the timed requests' blocks over the whole cache, as in real use. Nothing is stored there."""
        blocks = self._tables.blocks[:, : -(-2 * _MEASURED_CONTEXT // self.block_size)]
        spread = torch.arange(blocks.numel(), device=self.device).remainder_(self._num_blocks)
        blocks.copy_(spread.view(blocks.shape))

    def _trial_rows(self, size: int) -> DecodeRows:
        zeros = np.zeros(size, np.int32)
        seq_len = min(_MEASURED_CONTEXT, self._longest)
        rows = np.arange(size, dtype=np.int32)
        return DecodeRows(zeros, zeros, zeros - 1, zeros + seq_len, rows, zeros)

    def _prefill_trials(self) -> Iterator[tuple[int, Callable[[], object]]]:
        """One window of each captured size, at the end of a context."""
        for tokens in self._prefill_graphs.captured_sizes():
            if tokens <= self._longest:
                window = self._trial_window(tokens, samples=True)
                yield tokens, partial(self._prefill_graphs.run, [window])

    def _trial_window(self, tokens: int, *, samples: bool = False) -> Window:
        zeros = np.zeros((self._prefill_graphs.axes, tokens), np.int32)
        slots = np.full(tokens, -1)
        seq_len = min(self._kinds.attention.past_of_trials + tokens, self._longest)
        return Window(0, zeros[0], zeros, slots, seq_len, samples, ((tokens, -1),))

    def _mixed_trials(self, rows: int) -> Iterator[tuple[int, Callable[[], object]]]:
        """Both together: a window inside its prompt, since the last one of a prompt is never mixed."""
        for size in self._mixed_graphs.sizes():
            if size.rows == rows and size.tokens <= self._longest:
                window = self._trial_window(size.tokens)
                decode = self._trial_rows(rows)
                yield size.tokens, partial(self._mixed_graphs.run, size, [window], None, decode)

    @property
    def _longest(self) -> int:
        """Tokens of context that a row of the block tables holds."""
        return self._tables.blocks.shape[1] * self.block_size

    def open(self, admission: Admission) -> None:
        request_id = admission.request.request_id
        self._tables.open(request_id, admission.block_ids)
        for kind in self._kinds.of_requests:
            kind.open(admission, self._tables.row(request_id))

    def extend(self, request_id: str, count: int, blocks: Sequence[int]) -> None:
        self._tables.extend(request_id, count, blocks)

    def close(self, request_id: str) -> None:
        row = self._tables.close(request_id)
        for kind in self._kinds.of_requests:
            kind.close(request_id, row)

    def clear(self) -> None:
        self._tables.clear()
        for kind in self._kinds.of_requests:
            kind.clear()

    def step(self, decode: Windows, encode: Callable[[], Windows], embeddings: Embeddings) -> Sampled:
        """Decode is launched first: its tokens are read back while images are still being encoded."""
        decoded = self._decode(decode) if decode else None
        prefill = encode()
        prefilled = self._prefill(prefill, embeddings) if prefill else None
        if decoded and prefilled:
            return lambda: {**decoded(), **prefilled()}
        return decoded or prefilled or dict

    def logits(self, windows: Windows, embeddings: Embeddings) -> Tensor:
        """Of windows that sample, all prefill or all decode: [samples, vocabulary], until the next pass."""
        if all(window.start >= state.num_prompt for window, state in windows):
            rows = self._decode_rows(windows, self._batch_of(windows))
            self._tables.flush()
            return self._decode_graphs.run(rows).logits
        self._tables.flush()
        chunks = [self._window(window, state) for window, state in windows]
        return self._prefill_graphs.run(chunks, _splicing(windows, embeddings)).logits

    def _decode(self, windows: Windows) -> Sampled:
        batch = self._batch_of(windows)
        rows = self._decode_rows(windows, batch)
        self._tables.flush()
        return self._collecting(windows, batch, self._decode_graphs.run(rows), self._decoded)

    def mixed(self, prefill: Windows, embeddings: Embeddings, decode: Windows) -> Sampled:
        if not prefill:
            return self._decode(decode)
        tokens = sum(window.end - window.start for window, _ in prefill)
        size = self._mixed_graphs.fitting(tokens, len(prefill), len(decode))
        if size is None or needs_rows(prefill):
            self._prefill(prefill, embeddings)
            return self._decode(decode)
        chunks = [self._window(window, state) for window, state in prefill]
        if len(stretches_of(chunks, size.tokens)) > GRAPH_STRETCHES:
            self._run_prefill(prefill, chunks, embeddings)
            return self._decode(decode)
        batch = self._batch_of(decode)
        rows = self._decode_rows(decode, batch)
        self._tables.flush()
        decoded = self._mixed_graphs.run(size, chunks, _splicing(prefill, embeddings), rows)
        return self._collecting(decode, batch, decoded, self._decoded)

    def _prefill(self, windows: Windows, embeddings: Embeddings) -> Sampled:
        chunks = [self._window(window, state) for window, state in windows]
        return self._run_prefill(windows, chunks, embeddings)

    def _run_prefill(self, windows: Windows, chunks: Sequence[Window], embeddings: Embeddings) -> Sampled:
        self._tables.flush()
        all_rows = needs_rows(windows)
        decoded = self._prefill_graphs.run(chunks, _splicing(windows, embeddings), all_rows=all_rows)
        if decoded.rows is not None:
            keep_rows(windows, decoded.rows, self._decoder.decoder, self._logits_of)
        sampling = [(window, state) for window, state in windows if window.samples]
        if not sampling:
            return dict
        batch = DecodeBatch([state for _, state in sampling], self._tables)
        return self._collecting(sampling, batch, decoded, self._prefilled)

    def _logits_of(self, rows: Tensor) -> Tensor:
        logits = rows @ self._decoder.decoder.head.T
        self._decoder.finish(logits)
        return logits

    def _batch_of(self, windows: Windows) -> DecodeBatch:
        states = [state for _, state in windows]
        if states != self._last_batch.states:
            self._last_batch = DecodeBatch(states, self._tables)
        return self._last_batch

    def _decode_rows(self, windows: Windows, batch: DecodeBatch) -> DecodeRows:
        tables = self._tables
        starts = np.array([window.start for window, _ in windows], np.int32)
        tokens = [state.last_token if window.start < state.num_tokens else -1 for window, state in windows]
        for window, _ in windows:
            if window.new_blocks:  # the pass writes the block of the new token itself
                tables.set_by_device(tables.row(window.request_id), window.start // self.block_size)
        return DecodeRows(
            tokens=np.array(tokens, np.int32),
            positions=starts + batch.shifts,
            slots=tables.slots(batch.rows, starts, self.block_size),
            seq_lens=starts + 1,
            rows=batch.rows,
            states=self._begin_decode(windows, batch.rows),
        )

    def _begin_decode(self, windows: Windows, rows: Metadata) -> Metadata:
        """States of images that each row attends to."""
        states = np.zeros(len(rows), np.int32)
        for kind in self._kinds.of_requests:
            kind.begin_decode(windows, rows, states)
        return states

    def _window(self, window: ScheduledWindow, state: RequestState) -> Window:
        row = self._tables.row(window.request_id)
        rows = Window(
            row,
            embedded(state, window),
            state.positions(window.start, window.end),
            self._tables.slots(row, np.arange(window.start, window.end), self.block_size),
            window.end,
            window.samples,
        )
        for kind in self._kinds.of_requests:
            rows = kind.begin_prefill(rows, window, state)
        return rows

    def _sample(self, windows: Windows, batch: DecodeBatch, decoded: Decoded) -> None:
        """Replace the argmax of rows that sample on the device; the next step reads the tokens there."""
        if not batch.device_sampled:
            return
        which = batch.device_sampled
        sampling = []
        for window, state in (windows[i] for i in which):
            sampling.append((state.request.params, state.request.seed, window.end - state.num_prompt))
        inputs = SamplingInputs.of(sampling)
        here, rows = to_device(np.stack([which, batch.rows[which]]), self.device)
        values = to_device(inputs.values, self.device)
        sink = TokenSink(self._tables.last_tokens, rows)
        sample_tokens(decoded.logits, here, values, inputs.has_filters, decoded.tokens, sink)

    def _collecting(
        self, windows: Windows, batch: DecodeBatch, decoded: Decoded, to: TokenReadback
    ) -> Sampled:
        self._sample(windows, batch, decoded)
        pending = _Pending(batch, to.copy(decoded.tokens), decoded.logits, decoded.hidden)
        if self.device.type != "cuda":  # kernels in Triton's interpreter: everything is done already
            return lambda: _samples(pending)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()

        def collect() -> dict[str, Sample]:
            event.synchronize()
            return _samples(pending)

        return collect


@lru_cache(4096)  # a lookup is faster than a new tuple
def _sample_of(token: int) -> Sample:
    return Sample(token, None)


def _samples(pending: _Pending) -> dict[str, Sample]:
    batch = pending.batch
    tokens = pending.tokens.tolist()
    samples = dict(zip(batch.ids, map(_sample_of, tokens), strict=True))
    for state, token in zip(batch.states, tokens, strict=True):
        if state.samples_on_device:
            state.append(token)
    return {**samples, **_sample_on_host(pending)} if batch.host_sampled else samples


def _sample_on_host(pending: _Pending) -> dict[str, Sample]:
    """Requests with penalties, a grammar, logprobs, those of their prompt too, or pooling."""
    states = [pending.batch.states[i] for i in pending.batch.host_sampled]
    rows = torch.tensor(pending.batch.host_sampled).to(pending.logits.device)
    hidden = None if pending.hidden is None else pending.hidden[rows]
    return sample_or_pool(pending.logits[rows].float(), hidden, states)


def _splicing(windows: Windows, embeddings: Embeddings) -> Splice | None:
    """Writes the embeddings of images in the windows into the packed rows; None without any."""
    spans = []
    row = 0
    for window, state in windows:
        if window.start < state.num_prompt:
            inside = overlapping(state.spans, window.start, window.end)
            spans += [(row, window, span) for span in inside if span.is_spliced]
        row += window.end - window.start

    def write(embeds: Tensor) -> None:
        for first, window, span in spans:
            splice(embeds, first, window, span, embeddings[span.key])

    return write if spans else None
