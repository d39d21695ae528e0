"""Does what a plan says. The only owner of device memory: weights, KV blocks and resident embeddings."""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, replace
from itertools import compress
from operator import not_
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from saccade import costs
from saccade.checkpoint.config import ModelConfig
from saccade.errors import RequestError
from saccade.models.interface import CrossAttentionModel, RecurrentModel, VisionLanguageModel
from saccade.models.layers.attention import PagedAttention, PagedKV
from saccade.runner.batch import Batch, Ints, RequestState, build_batch, overlapping, splice
from saccade.runner.cross_attention import reading, rows_by_image
from saccade.runner.cuda.host_threads import OneThread
from saccade.runner.device import DeviceForward, Sampled, Windows
from saccade.runner.encoder.embedding_cache import EmbeddingSlab
from saccade.runner.encoder.stage import Encoder, LocalEncoder
from saccade.runner.profile import largest_within, seconds_per_layer
from saccade.runner.recurrent_state import RecurrentStates
from saccade.runner.sampler import sample
from saccade.sampling_params import SamplingParams
from saccade.structured.grammar import Grammars
from saccade.types import (
    Admission,
    Collect,
    Geometry,
    Grid,
    Key,
    MediaItem,
    Prompt,
    Request,
    Sample,
    ScheduledWindow,
    StepPlan,
    StepResult,
)


class Runner:
    def __init__(
        self,
        model: VisionLanguageModel,
        kv: PagedKV,
        encoder: Encoder | None,
        grammars: Grammars,
        block_size: int,
        device: DeviceForward | None = None,
        embeddings: MutableMapping[Key, Tensor] | None = None,
        memory: Mapping[str, Mapping[str, int]] | None = None,
        recurrent: RecurrentStates | None = None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.encoder = encoder  # None for a model without a vision tower
        self.grammars = grammars
        self.block_size = block_size
        self.device = device  # launches steps without waiting for them; None: steps are computed here and now
        # [slots, hidden] each; which keys are here is the scheduler's decision
        self.embeddings: MutableMapping[Key, Tensor] = {} if embeddings is None else embeddings
        self._places: dict[Key, Ints] = {}  # [2, slots] of those that were pruned: row and column of each
        self.memory = memory or {}  # bytes planned and measured, by use
        self.recurrent = recurrent  # states of layers without keys and values, for models that have such
        self._states: dict[str, RequestState] = {}
        self._scale = model.decoder.scale
        # What is left to the host of a GPU are copies of a few kilobytes. Sharing one out to all cores takes
        # microseconds, or ten milliseconds where others decode pictures on them.
        self._one_thread = OneThread() if kv.k.is_cuda else None

    @property
    def is_overlapping(self) -> bool:
        """Whether `launch` returns before its step is done, so that the host can work meanwhile."""
        return self.device is not None

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan)()

    def decode_early(self, items: Sequence[MediaItem]) -> None:
        """Begin to decode pictures of a request that has just come, as far as there is room."""
        if self.encoder:
            self.encoder.decode_early(items)

    def release(self) -> None:
        """Give up what was decoded for requests that do not come."""
        if self.encoder:
            self.encoder.release()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Collect:
        self._update_state(plan)
        return self._launch_on(self.device, plan) if self.device else self._compute(plan)

    def _compute(self, plan: StepPlan) -> Collect:
        encoded = self._encode(plan)
        windows = [w for work in plan.windows if (w := self._before_failed(work, encoded.failed))]
        if not windows:
            return lambda: encoded
        states = [self._states[w.request_id] for w in windows]
        batch = build_batch(windows, states, self.block_size, self.kv.k.device)
        samples = self._sample(batch, self._forward(batch, windows))
        result = replace(encoded, samples=samples, unsampled=_broken(list(zip(windows, states, strict=True))))
        return lambda: result

    def _launch_on(self, device: DeviceForward, plan: StepPlan) -> Collect:
        """Decoding is launched first: its tokens are waited for while pictures are still being worked on."""
        decoding, prompts = self._windows(plan)
        decoded = device.decode(decoding) if decoding else None
        encoded = self._encode(plan)
        prompts = self._readable(prompts, encoded)
        computed = device.prompts(prompts, self.embeddings) if prompts else None
        return _collecting(encoded, [*decoding, *prompts], [found for found in (decoded, computed) if found])

    @torch.inference_mode()
    def launch_both(self, beside: StepPlan, ahead: StepPlan) -> tuple[Collect, Collect]:
        """What is done beside a step, and the next step: one pass for both where the first one rides along."""
        device = self.device
        if device is None or not beside.rides:
            return self.launch(beside), self.launch(ahead)
        self._update_state(beside)
        encoded = self._encode(beside)
        prompts = self._readable(self._windows(beside)[1], encoded)
        self._update_state(ahead)
        decoding, _ = self._windows(ahead)
        decoded = device.mixed(prompts, self.embeddings, decoding) if prompts else device.decode(decoding)
        return _collecting(encoded, prompts, []), _collecting(StepResult({}), decoding, [decoded])

    def _readable(self, prompts: Windows, encoded: StepResult) -> Windows:
        """As far as there are pictures for them."""
        return [(w, state) for work, state in prompts if (w := self._before_failed(work, encoded.failed))]

    def _windows(self, plan: StepPlan) -> tuple[Windows, Windows]:
        """Those of the latest token alone, behind a prompt, and the others."""
        windows = [(work, self._states[work.request_id]) for work in plan.windows]
        if plan.is_ahead:
            return windows, ()
        is_latest = [w.end - w.start == 1 and w.start >= state.num_prompt and w.samples for w, state in windows]
        return list(compress(windows, is_latest)), list(compress(windows, map(not_, is_latest)))

    def warm_up(self, largest: Geometry) -> None:
        """A picture's way on a device. Kernels that are compiled or loaded at their first use are so now."""
        vision = self.model.config.vision
        if vision and isinstance(self.encoder, LocalEncoder):
            self.encoder.warm_up(largest, vision.temporal_patch_size)
        if isinstance(self.embeddings, EmbeddingSlab):
            self.embeddings.warm_up()

    @torch.inference_mode()
    def seconds_per_prompt_token(self, tokens: int = 128) -> float:
        """Measured on scratch blocks; call it before any request is admitted."""
        tokens = min(tokens, self.kv.k.shape[1])
        state = RequestState(_scratch_admission(tokens, self.model.config, self.block_size))
        work = ScheduledWindow("scratch", 0, tokens, (), False)
        batch = build_batch([work], [state], self.block_size, self.kv.k.device)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            if self.recurrent:
                self.recurrent.open(work.request_id)
            attention = PagedAttention(self.kv, batch.attention, self._scale)
            self._through(self.model.embed(batch.token_ids), batch, attention, [work])
            if self.recurrent:
                self.recurrent.close(work.request_id)
            times.append(time.perf_counter() - start)
        return min(times) / tokens

    def seconds_per_slice(self, largest: Grid) -> float:
        """Measured: one encoder layer over as many patches as a pass takes. `largest`: the most expensive picture."""
        assert self.encoder is not None
        grid = largest_within(self.model.config, largest, self.encoder.max_patches)
        return seconds_per_layer(self.model, grid) * max(1.0, self.encoder.max_patches / grid.patches)

    def reset(self) -> None:
        """Forget all requests and everything under way; resident embeddings go when the scheduler says so."""
        if self.kv.k.is_cuda:
            torch.cuda.synchronize(self.kv.k.device)  # raises where the context has died: no later step would succeed
        self._states.clear()
        if self.recurrent:
            self.recurrent.clear()
        if self.device:
            self.device.clear()
        if self.encoder:
            self.encoder.clear()

    def stats(self) -> dict[str, Any]:
        """Counters of pictures: decoded, encoded, passes through the tower, failures, most patches held at once."""
        dtype = str(self.kv.k.dtype).removeprefix("torch.")
        return {
            "encoder": asdict(self.encoder.counters) if self.encoder else {},
            "memory": self.memory,
            "embedding_bytes_per_slot": costs.embedding_bytes_per_slot(self.model.config.text, dtype),
        }

    def close(self) -> None:
        if self._one_thread:
            self._one_thread.end()
        if self.encoder:
            self.encoder.close()
        self.grammars.close()

    def _update_state(self, plan: StepPlan) -> None:
        for request_id in plan.freed_requests:
            if self.recurrent:
                self.recurrent.close(request_id)
            if self._states.pop(request_id, None) and self.device:
                self.device.close(request_id)
        for key in plan.evicted:
            if key in self.embeddings:
                del self.embeddings[key]
            self._places.pop(key, None)
        for admission in plan.admitted:
            # A preempted request finds the grammar where it left it.
            grammar = self.grammars.of(admission.request)
            self._states[admission.request.request_id] = RequestState(admission, grammar, self._places)
            if self.recurrent:
                self.recurrent.open(admission.request.request_id, admission.state)
            if self.device:
                self.device.open(admission.request.request_id, admission.block_ids)
        for work in plan.windows:
            if work.new_blocks:
                blocks = self._states[work.request_id].blocks
                if self.device:
                    self.device.extend(work.request_id, len(blocks), work.new_blocks)
                blocks.extend(work.new_blocks)
        if self.device is None:  # its kernels read nothing behind a context
            self._clear_partly_filled(plan)

    def _clear_partly_filled(self, plan: StepPlan) -> None:
        blocks = [w.new_blocks[-1] for w in plan.windows if w.new_blocks and w.end % self.block_size]
        if blocks:
            self.kv.clear(blocks, self.block_size)

    def _encode(self, plan: StepPlan) -> StepResult:
        """Give the stage its new pictures, advance it as far as the plan allows, and take what is ready."""
        if self.encoder is None:
            return StepResult({})
        if plan.encode:
            self.encoder.submit(plan.encode)
        advanced = self.encoder.advance(plan.encode_layers, may_wait=not (plan.windows or plan.is_beside))
        if plan.encode_layers != 0:  # otherwise the encoder rests, and earlier guesses still hold
            self.encoder.prefetch(plan.prefetch)
        done = self.encoder.poll()
        self.embeddings.update(done.embeddings)
        self._places.update(done.places)
        return StepResult({}, done.times, done.errors, slice=advanced)

    def _before_failed(self, work: ScheduledWindow, failed: Mapping[Key, RequestError]) -> ScheduledWindow | None:
        """Cut a window before a picture that could not be had: others may share the blocks of the text before it."""
        if not failed:
            return work
        spans = reading(self._states[work.request_id].spans, work.start, work.end)
        bad = [span.start for span in spans if span.key in failed]
        if not bad:
            return work
        end = max(work.start, min(bad))
        return work._replace(end=end, samples=False) if end > work.start else None

    def _forward(self, batch: Batch, windows: list[ScheduledWindow]) -> Tensor:
        embeds = self.model.embed(batch.token_ids)  # [T, H]
        self._splice(embeds, windows)
        attention = PagedAttention(self.kv, batch.attention, self._scale)
        with_spans = [(work, self._states[work.request_id].spans) for work in windows]
        if seen := rows_by_image(with_spans, self.embeddings, embeds.device):
            return cast(CrossAttentionModel, self.model).forward(embeds, batch.positions, attention, seen)
        return self._through(embeds, batch, attention, windows)

    def _through(
        self, embeds: Tensor, batch: Batch, attention: PagedAttention, windows: list[ScheduledWindow]
    ) -> Tensor:
        if self.recurrent is None:
            return self.model.forward(embeds, batch.positions, attention)
        states = self.recurrent.of(windows)
        return cast(RecurrentModel, self.model).forward(embeds, batch.positions, attention, states)

    def _splice(self, embeds: Tensor, windows: list[ScheduledWindow]) -> None:
        row = 0
        for work in windows:
            state = self._states[work.request_id]
            if work.start < state.num_prompt:
                for span in overlapping(state.spans, work.start, work.end):
                    splice(embeds, row, work, span, self.embeddings[span.key])
            row += work.end - work.start

    def _sample(self, batch: Batch, hidden: Tensor) -> dict[str, Sample]:
        if not batch.sampled:
            return {}
        logits = self.model.logits(hidden[batch.last_rows])  # [samples, V]
        states = [self._states[request_id] for request_id in batch.sampled]
        samples = sample(logits, [state.row() for state in states])
        taken = [state.take(chosen) for state, chosen in zip(states, samples, strict=True)]
        return dict(zip(batch.sampled, taken, strict=True))


def _collecting(encoded: StepResult, windows: Windows, sampled: Sequence[Sampled]) -> Collect:
    def collect() -> StepResult:
        with torch.inference_mode():
            samples = {request_id: sample for found in sampled for request_id, sample in found().items()}
        return replace(encoded, samples=samples, unsampled=_broken(windows))

    return collect


def _broken(windows: Windows) -> dict[str, RequestError]:
    """Requests whose grammar broke: what was drawn for them means nothing."""
    held = [(work.request_id, state.grammar) for work, state in windows if state.grammar is not None and work.samples]
    return {i: grammar.error for i, grammar in held if grammar.error}


def _scratch_admission(tokens: int, config: ModelConfig, block_size: int) -> Admission:
    axes = 3 if config.text.mrope_section else 1
    positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), (axes, tokens))
    prompt = Prompt([0] * tokens, (), (), positions, tokens, b"")
    request = Request("scratch", prompt, SamplingParams(), 1, frozenset(), 0)
    return Admission(request, (), tuple(range(costs.blocks_for(tokens, block_size))))
