"""Executes step plans. The only owner of device memory: weights, KV blocks and resident embeddings."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, MutableMapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from saccade import costs
from saccade.errors import RequestError
from saccade.models.interface import HasReach, VisionLanguageModel
from saccade.models.layers.torch_attention import PagedKV
from saccade.runner.batch import Ints, RequestState
from saccade.runner.build_embedding_tiers import open_tiers
from saccade.runner.cross_attention_metadata import reading
from saccade.runner.cuda.kv_host_blocks import HostBlocks
from saccade.runner.device_memory import GpuMemory
from saccade.runner.embedding_cache import EmbeddingSlab
from saccade.runner.encoder.encoder_runner import Encoder, LocalEncoder
from saccade.runner.forward import Forward, Sampled, Windows
from saccade.runner.latency_profile import largest_within, seconds_per_layer
from saccade.structured.grammar import Grammars
from saccade.types.attention_reach import AttentionReach
from saccade.types.media import Geometry, Grid, Key, MediaItem
from saccade.types.step import Collect, ScheduledWindow, StepPlan, StepResult


class Runner:
    def __init__(
        self,
        model: VisionLanguageModel,
        kv: PagedKV,
        encoder: Encoder | None,
        grammars: Grammars,
        forward: Forward,
        embeddings: MutableMapping[Key, Tensor] | None = None,
        memory: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
        on_close: Callable[[], None] | None = None,
        eager_reason: str | None = None,
        host_blocks: HostBlocks | None = None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.encoder = encoder  # None for a model without a vision tower
        self.grammars = grammars
        self.forward = forward
        # [slots, hidden] each; the scheduler decides which keys are resident
        self.embeddings: MutableMapping[Key, Tensor] = {} if embeddings is None else embeddings
        self._coordinates: dict[Key, Ints] = {}  # [2, slots] of pruned ones: row and column of each token
        self.memory = dict(memory)  # bytes planned and measured, by use
        self._states: dict[str, RequestState] = {}
        self.eager_reason = eager_reason  # why a GPU runs it without kernels and CUDA graphs
        self._on_close = on_close
        self._gpu_memory = GpuMemory(kv.k.device)
        self.host_blocks = host_blocks  # None: no KV block is copied to host memory

    @property
    def is_async(self) -> bool:
        """Whether `launch` returns before its step is done."""
        return self.forward.is_async

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan)()

    def prefetch_media(self, items: Sequence[MediaItem]) -> None:
        """Begin to decode images of a request that has just arrived, within the decode budget."""
        if self.encoder:
            self.encoder.prefetch_media(items)

    def release(self) -> None:
        """Drop what was decoded early and not submitted."""
        if self.encoder:
            self.encoder.release()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Collect:
        self._update_state(plan)
        encoded = StepResult({})
        prefill: Windows = ()

        def encode() -> Windows:
            nonlocal encoded, prefill
            encoded = self._encode(plan)
            prefill = self._computable(plan.prefill, encoded)
            return prefill

        decode = self._with_states(plan.decode)
        sampled = self.forward.step(decode, encode, self.embeddings)
        return _collecting(encoded, [*decode, *prefill], sampled)

    @torch.inference_mode()
    def launch_both(self, prefill: StepPlan, decode: StepPlan) -> tuple[Collect, Collect]:
        """A prefill step and the decode step after it: as one mixed batch if the plan says so."""
        if not prefill.fuse_with_next:
            return self.launch(prefill), self.launch(decode)
        self._update_state(prefill)
        encoded = self._encode(prefill)
        windows = self._computable(prefill.prefill, encoded)
        self._update_state(decode)
        decoding = self._with_states(decode.decode)
        sampled = self.forward.mixed(windows, self.embeddings, decoding)
        return _collecting(encoded, windows, dict), _collecting(StepResult({}), decoding, sampled)

    def _with_states(self, windows: Sequence[ScheduledWindow]) -> Windows:
        return [(window, self._states[window.request_id]) for window in windows]

    def _computable(self, windows: Sequence[ScheduledWindow], encoded: StepResult) -> Windows:
        """Windows as far as the images in them could be encoded."""
        if encoded.failed:
            windows = [w for window in windows if (w := self._before_failed(window, encoded.failed))]
        return self._with_states(windows)

    @property
    def reach(self) -> AttentionReach | None:
        """How far back the model's layers read, unless one reads all."""
        return self.model.reach if isinstance(self.model, HasReach) else None

    def warm_up(self, largest: Geometry) -> None:
        """Run an image through preprocessing and the cache, which compiles and loads kernels."""
        vision = self.model.config.vision
        if vision and isinstance(self.encoder, LocalEncoder):
            self.encoder.warm_up(largest, vision.temporal_patch_size)
        if isinstance(self.embeddings, EmbeddingSlab):
            self.embeddings.warm_up()

    def open_tiers(self, largest: Geometry) -> tuple[str, ...]:
        """Measure the tiers of embeddings and use those that pay. Returns the reasons."""
        encoder = self.encoder
        if not isinstance(encoder, LocalEncoder) or encoder.tiers is None:
            return ()
        return open_tiers(encoder.tiers, self.model, largest, encoder.max_patches, encoder.place)

    def seconds_per_slice(self, largest: Grid) -> float:
        """Measured: one encoder layer over a full pass. `largest`: the most expensive image."""
        assert self.encoder is not None
        grid = largest_within(self.model.config, largest, self.encoder.max_patches)
        return seconds_per_layer(self.model, grid) * max(1.0, self.encoder.max_patches / grid.patches)

    def reset(self) -> None:
        """Drop all requests and everything in flight. Resident embeddings stay until they are evicted."""
        if self.kv.k.is_cuda:
            torch.cuda.synchronize(self.kv.k.device)  # raises if the CUDA context has died
        self._states.clear()
        self.forward.clear()
        if self.encoder:
            self.encoder.clear()

    def stats(self) -> dict[str, Any]:
        """Counters of the encoder, memory by use, how KV is stored, and bytes of an embedding slot."""
        dtype = str(self.model.decoder.table.dtype).removeprefix("torch.")
        of_encoder: Sequence[Mapping[str, Any]] = ({}, {}, {})
        if self.encoder is not None:
            counters = asdict(self.encoder.counters)
            of_encoder = (counters, self.encoder.tier_stats(), self.encoder.remote_stats())
        return {
            **dict(zip(("encoder", "embedding_tiers", "remote_encoders"), of_encoder, strict=True)),
            "memory": self.memory,
            "gpu_memory": self._gpu_memory.stats(),
            "kv_cache_dtype": str(self.kv.k.dtype).removeprefix("torch."),
            "kv_bytes_per_token": self.kv.bytes_per_token,
            "kv_bytes_per_block": self.host_blocks.block_bytes if self.host_blocks else 0,
            "embedding_bytes_per_slot": costs.embedding_bytes_per_slot(self.model.config.text, dtype),
        }

    def drop_host_blocks(self) -> None:
        """Give the host memory of KV blocks back."""
        if self.host_blocks:
            self.host_blocks.close()
        self.host_blocks = None

    def close(self) -> None:
        if self._on_close:
            self._on_close()
        if self.encoder:
            self.encoder.close()
        self.grammars.close()
        self.drop_host_blocks()

    def _update_state(self, plan: StepPlan) -> None:
        if self.host_blocks:
            self.host_blocks.copy(plan.offloaded, plan.restored)
        for request_id in plan.freed_requests:
            if self._states.pop(request_id, None):
                self.forward.close(request_id)
        for key in plan.evicted:
            if key in self.embeddings:
                del self.embeddings[key]
            self._coordinates.pop(key, None)
        if self.encoder:
            self.encoder.end(plan.unwanted)
        for admission in plan.admitted:
            # A preempted request continues with its grammar's state.
            grammar = self.grammars.of(admission.request)
            self._states[admission.request.request_id] = RequestState(admission, grammar, self._coordinates)
            self.forward.open(admission)
        for window in plan.windows:
            if window.new_blocks:
                blocks = self._states[window.request_id].blocks
                self.forward.extend(window.request_id, len(blocks), window.new_blocks)
                blocks.extend(window.new_blocks)

    def _encode(self, plan: StepPlan) -> StepResult:
        """Submit the plan's images, advance the encoder as far as the plan allows, and take what is ready."""
        if self.encoder is None:
            return StepResult({})
        if plan.encode:
            self.encoder.submit(plan.encode)
        if plan.encode_layers != 0:  # otherwise the encoder pauses and earlier prefetches stay
            self.encoder.prefetch(plan.prefetch)  # before a tower whose code waits for the device
        may_wait = plan.kind == "sync" and not plan.windows
        advanced = self.encoder.advance(plan.encode_layers, may_wait=may_wait)
        if plan.decode_first:
            self.encoder.decode_first(plan.decode_first)
        images = self.encoder.poll()
        self.embeddings.update(images.embeddings)
        self._coordinates.update(images.coordinates)
        return StepResult(
            {},
            images.times,
            images.errors,
            slice=advanced,
            restored=frozenset(images.restored),
            local_work=self.encoder.local_work,
            decoded=self.encoder.decoded_first(),
        )

    def _before_failed(self, window: ScheduledWindow, failed: Container[Key]) -> ScheduledWindow | None:
        """Cut a window before an image that failed: others may share the blocks of the text before it."""
        spans = reading(self._states[window.request_id].spans, window.start, window.end)
        bad = [span.start for span in spans if span.key in failed]
        if not bad:
            return window
        end = max(window.start, min(bad))
        return window._replace(end=end, samples=False) if end > window.start else None


def _collecting(encoded: StepResult, windows: Windows, sampled: Sampled) -> Collect:
    def collect() -> StepResult:
        with torch.inference_mode():
            samples = sampled()
        return replace(encoded, samples=samples, unsampled=_broken(windows))

    return collect


def _broken(windows: Windows) -> dict[str, RequestError]:
    """Requests whose grammar failed: their samples are invalid."""
    grammars = {window.request_id: state.grammar for window, state in windows if window.samples}
    return {name: grammar.error for name, grammar in grammars.items() if grammar and grammar.error}
