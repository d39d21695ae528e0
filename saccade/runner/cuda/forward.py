"""Computes a step's windows on a CUDA device without waiting for it: launch now, ask for the tokens later.

Requests that decode go through one graph, prompts through another pass: each has the shapes it is fast at. Parts of
prompts that fit go along with a decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.kernels.attention.prefill_flashinfer import FlashInferPrefill
from saccade.kernels.ops.argmax import TokenSink
from saccade.models.cuda.decoder import FusedDecoder
from saccade.models.interface import VisionLanguageModel
from saccade.models.layers.attention import PagedKV
from saccade.models.layers.decoder import Decoder
from saccade.runner.batch import RequestState, embedded, overlapping, splice
from saccade.runner.cuda.block_table import BlockTables
from saccade.runner.cuda.decode_batch import DecodeBatch
from saccade.runner.cuda.decode_graphs import Decoded, DecodeGraphs, DecodeRows
from saccade.runner.cuda.graph_sizes import GRAPH_WINDOWS
from saccade.runner.cuda.mixed_graphs import MixedGraphs
from saccade.runner.cuda.prefill_graphs import PrefillGraphs, Splice, Window
from saccade.runner.cuda.sampling import has_kernel, sample_tokens
from saccade.runner.cuda.staging import TokenReadback, to_device
from saccade.runner.forward import Embeddings, Sampled, Windows
from saccade.runner.profile import layer_curve, timed_curve
from saccade.runner.sampler import SamplingInputs, sample
from saccade.types import Admission, Grid, LatencyProfile, Sample, ScheduledWindow

_MEASURED_CONTEXT = 1024  # tokens behind each request whose decoding is timed


class _Picked(NamedTuple):
    """Rows that sample: their tokens, on their way to the host, and the logits for those that want more."""

    group: DecodeBatch
    tokens: Tensor  # int64, pinned
    logits: Tensor  # [rows, vocabulary], on the device


class CudaForward:
    is_async = True

    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKV,
        *,
        block_size: int,
        max_requests: int,
        max_blocks: int,
        axes: int,
        flash: FlashInferPrefill | None = None,  # None: prompts go through our own kernels alone
    ) -> None:
        self.block_size = block_size
        self.device = kv.k.device
        self._num_blocks = kv.k.shape[1] // block_size
        self._tables = BlockTables(max_requests, max_blocks, self.device)
        self._decoder = FusedDecoder(decoder, kv)
        self._decoding = DecodeGraphs(self._decoder, self._tables, block_size, max_requests)
        self._prompts = PrefillGraphs(self._decoder, self._tables, block_size, axes, flash)
        # FlashInfer plans each pass of prompts on the host, and none that is mixed.
        self._mixed = MixedGraphs(self._prompts, self._decoding) if flash is None else None
        self._decoded = TokenReadback(max_requests, self.device)
        self._prefilled = TokenReadback(max_requests, self.device)
        self._group = DecodeBatch([], self._tables)  # that decoded last

    @torch.inference_mode()
    def record(self, max_tokens: int) -> None:
        """Compile every kernel and record every graph: nothing of it is left for the first request to wait for."""
        pool = torch.cuda.graph_pool_handle()
        self._prompts.record(pool, max_tokens)
        self._decoding.record(pool)
        if self._mixed:
            self._mixed.record(pool, max_tokens)
        has_kernel(self.device, self._decoder.decoder.head.dtype, self._decoder.vocab_size)  # of what draws tokens
        torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def measure(self, model: VisionLanguageModel, largest: Grid | None, target_ms: float | None) -> LatencyProfile:
        self._scatter_blocks()
        decode, prompts = timed_curve(self._decode_trials()), timed_curve(self._prompt_trials())
        riding = [(rows, timed_curve(self._mixed_trials(rows))) for rows in self._mixed_rows()]
        return LatencyProfile(decode, prompts, layer_curve(model, largest), target_ms, GRAPH_WINDOWS, tuple(riding))

    def _scatter_blocks(self) -> None:
        """Keys from all of the cache, as requests have them, for what is timed. Nothing is stored there."""
        tables = self._tables.blocks
        some = tables[:, : -(-2 * _MEASURED_CONTEXT // self.block_size)]
        some.copy_(torch.arange(some.numel(), device=self.device).remainder_(self._num_blocks).view(some.shape))

    def _decode_trials(self) -> Iterator[tuple[int, Callable[[], object]]]:
        """A run of each recorded size."""
        for size in self._decoding.sizes:
            yield size, partial(self._decoding.run, self._trial_rows(size))

    def _trial_rows(self, size: int) -> DecodeRows:
        zeros, context = np.zeros(size, np.int32), min(_MEASURED_CONTEXT, self._longest)
        return DecodeRows(zeros, zeros, zeros - 1, zeros + context, np.arange(size, dtype=np.int32))

    def _prompt_trials(self) -> Iterator[tuple[int, Callable[[], object]]]:
        """The same for prompts: one window at the end of a context."""
        for tokens in self._prompts.recorded_sizes():
            if tokens <= self._longest:
                yield tokens, partial(self._prompts.run, [self._trial_window(tokens)._replace(samples=True)])

    def _trial_window(self, tokens: int) -> Window:
        zeros, slots = np.zeros((self._prompts.axes, tokens), np.int32), np.full(tokens, -1)
        context = min(_MEASURED_CONTEXT + tokens, self._longest)
        return Window(0, zeros[0], zeros, slots, context, samples=False)

    def _mixed_rows(self) -> list[int]:
        return sorted({size.rows for size in self._mixed.sizes()}) if self._mixed else []

    def _mixed_trials(self, rows: int) -> Iterator[tuple[int, Callable[[], object]]]:
        """The same for both together: a window in the middle of its prompt, for those at its end go by themselves."""
        assert self._mixed is not None
        for size in self._mixed.sizes():
            if size.rows == rows and size.tokens <= self._longest:
                window = self._trial_window(size.tokens)
                yield size.tokens, partial(self._mixed.run, size, [window], None, self._trial_rows(rows))

    @property
    def _longest(self) -> int:
        """Context that the block tables hold."""
        return self._tables.blocks.shape[1] * self.block_size

    def open(self, admission: Admission) -> None:
        self._tables.open(admission.request.request_id, admission.block_ids)

    def extend(self, request_id: str, held: int, blocks: Sequence[int]) -> None:
        self._tables.extend(request_id, held, blocks)

    def close(self, request_id: str) -> None:
        self._tables.close(request_id)

    def clear(self) -> None:
        self._tables.clear()

    def step(self, decode: Windows, encode: Callable[[], Windows], embeddings: Embeddings) -> Sampled:
        """Decoding is launched first: its tokens are read back while images are still being encoded."""
        decoded = self._decode(decode) if decode else None
        prefill = encode()
        prefilled = self._prefill(prefill, embeddings) if prefill else None
        if decoded and prefilled:
            return lambda: {**decoded(), **prefilled()}
        return decoded or prefilled or dict

    def _decode(self, windows: Windows) -> Sampled:
        group = self._regroup(windows)
        rows = self._decode_rows(windows, group)
        self._tables.flush()
        return self._collecting(windows, group, self._decoding.run(rows), self._decoded)

    def mixed(self, prefill: Windows, embeddings: Embeddings, decode: Windows) -> Sampled:
        if not prefill:
            return self._decode(decode)
        tokens = sum(window.end - window.start for window, _ in prefill)
        size = self._mixed.fitting(tokens, len(prefill), len(decode)) if self._mixed else None
        if self._mixed is None or size is None:
            self._prefill(prefill, embeddings)
            return self._decode(decode)
        group = self._regroup(decode)
        rows = self._decode_rows(decode, group)
        self._tables.flush()
        found = self._mixed.run(size, self._prefill_windows(prefill), _splicing(prefill, embeddings), rows)
        return self._collecting(decode, group, found, self._decoded)

    def _prefill(self, windows: Windows, embeddings: Embeddings) -> Sampled:
        self._tables.flush()
        found = self._prompts.run(self._prefill_windows(windows), _splicing(windows, embeddings))
        sampling = [(window, state) for window, state in windows if window.samples]
        if not sampling:
            return dict
        group = DecodeBatch([state for _, state in sampling], self._tables)
        return self._collecting(sampling, group, found, self._prefilled)

    def _regroup(self, windows: Windows) -> DecodeBatch:
        """Of those that decode now: in most steps the same as in the last one."""
        states = [state for _, state in windows]
        if states != self._group.states:
            self._group = DecodeBatch(states, self._tables)
        return self._group

    def _decode_rows(self, windows: Windows, group: DecodeBatch) -> DecodeRows:
        tables, size = self._tables, self.block_size
        places = np.array([work.start for work, _ in windows], np.int32)
        tokens = [state.last_token if work.start < state.num_tokens else -1 for work, state in windows]
        for work, _ in windows:
            if work.new_blocks:  # the pass enters it: the block of the new token's slot
                tables.set_by_device(tables.row(work.request_id), work.start // size)
        slots = tables.slots(group.rows, places, size)
        return DecodeRows(np.array(tokens, np.int32), places + group.shifts, slots, places + 1, group.rows)

    def _prefill_windows(self, windows: Windows) -> list[Window]:
        return [self._window(work, state) for work, state in windows]

    def _window(self, work: ScheduledWindow, state: RequestState) -> Window:
        row = self._tables.row(work.request_id)
        return Window(
            row,
            embedded(state, work),
            state.positions(work.start, work.end),
            self._tables.slots(row, np.arange(work.start, work.end), self.block_size),
            work.end,
            work.samples,
        )

    def _sample(self, windows: Windows, group: DecodeBatch, found: Decoded) -> None:
        """Tokens other than the likeliest, in their place: the next step takes them from there, unseen by the host."""
        if not group.device_sampled:
            return
        sampling_inputs = [windows[i] for i in group.device_sampled]
        asked = SamplingInputs.of(
            [(s.request.params, s.request.seed, work.end - s.num_prompt) for work, s in sampling_inputs]
        )
        here, rows = to_device(np.stack([group.device_sampled, group.rows[group.device_sampled]]), self.device)
        numbers, sink = to_device(asked.numbers, self.device), TokenSink(self._tables.last_tokens, rows)
        sample_tokens(found.logits, here, numbers, asked.is_cut, found.tokens, sink)

    def _collecting(self, windows: Windows, group: DecodeBatch, found: Decoded, returns: TokenReadback) -> Sampled:
        self._sample(windows, group, found)
        picked = _Picked(group, returns.fetch(found.tokens), found.logits)
        if self.device.type != "cuda":  # kernels in Triton's interpreter: everything is done already
            return lambda: _samples(picked)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()

        def collect() -> dict[str, Sample]:
            done.synchronize()
            return _samples(picked)

        return collect


@lru_cache(4096)  # an answer's next token is looked up faster than made
def _plain(token: int) -> Sample:
    return Sample(token, None)


def _samples(picked: _Picked) -> dict[str, Sample]:
    """Most have their token already."""
    group, tokens = picked.group, picked.tokens.tolist()
    found = dict(zip(group.ids, map(_plain, tokens), strict=True))
    for state, token in zip(group.states, tokens, strict=True):
        if state.samples_on_device:
            state.append(token)
    return {**found, **_sampled(picked)} if group.sampled else found


def _sampled(picked: _Picked) -> dict[str, Sample]:
    """The others need to know the tokens before, a grammar, or more than the token."""
    states, rows = [picked.group.states[i] for i in picked.group.sampled], torch.tensor(picked.group.sampled)
    logits = picked.logits[rows.to(picked.logits.device)].float()
    device_sampled = zip(states, sample(logits, [state.row() for state in states]), strict=True)
    return {state.request.request_id: state.take(chosen) for state, chosen in device_sampled}


def _splicing(windows: Windows, embeddings: Embeddings) -> Splice | None:
    """How the pictures inside the windows come into the packed rows; None without any."""
    found, row = [], 0
    for work, state in windows:
        if work.start < state.num_prompt:
            found += [(row, work, span) for span in overlapping(state.spans, work.start, work.end)]
        row += work.end - work.start

    def write(embeds: Tensor) -> None:
        for first, work, span in found:
            splice(embeds, first, work, span, embeddings[span.key])

    return write if found else None
