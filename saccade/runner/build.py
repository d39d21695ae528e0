"""Puts a runner together: weights, KV blocks, encoder stage, grammars."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade import costs
from saccade.checkpoint.config import ModelConfig
from saccade.errors import ConfigError
from saccade.models import eager_reason, load_model
from saccade.models.interface import VisionLanguageModel
from saccade.models.layers.torch_attention import PagedKV
from saccade.options import Options, SchedulerConfig
from saccade.runner.cuda.attention_selector import AttentionTarget, check, choose
from saccade.runner.encoder.embedding_cache import EmbeddingSlab
from saccade.runner.encoder.encoder_runner import LocalEncoder
from saccade.runner.encoder.graph_capture import capture_tower
from saccade.runner.forward import Forward
from saccade.runner.memory import MemoryPlan
from saccade.runner.memory_report import MemoryReport
from saccade.runner.recurrent_state import RecurrentStates
from saccade.runner.runner import Runner
from saccade.runner.torch_forward import TorchForward
from saccade.runner.torch_threads import OneTorchThread
from saccade.structured.grammar import Grammars
from saccade.types import Key

_MAX_DECODE_THREADS = 8
_MAX_SLICED_PATCHES = 2048  # per pass when encoding is sliced: a slice is one layer over the whole pass


def build_runner(
    path: Path,
    config: ModelConfig,
    image_processor: Mapping[str, Any],
    options: Options,
    plan: MemoryPlan,
    *,
    progress: bool = True,
) -> Runner:
    memory = MemoryReport(plan)
    sizes = plan.scheduler
    target = AttentionTarget(config.text, plan.dtype, plan.device)
    check(options.attention_backend, target)
    if plan.device.type == "cuda":
        if plan.device.index is not None:
            torch.cuda.set_device(plan.device)  # kernels launch on the current device, not the tensors'
        # Other processes may use the rest, so the allocator enforces it.
        torch.cuda.set_per_process_memory_fraction(options.gpu_memory_utilization, plan.device.index)
    with memory.part("weights"):
        model = load_model(
            path,
            config,
            dtype=plan.dtype,
            device=plan.device,
            load_format=options.load_format,
            seed=options.seed,
            progress=progress,
            image_processor=image_processor,
            max_model_len=sizes.max_model_len,
        )
    with memory.part("kv"):
        kv = PagedKV.allocate(config.text, sizes.num_blocks, sizes.block_size, plan.dtype, plan.device)
    with memory.part("states"):
        states = _states(config, sizes, plan)
    with memory.part("embeddings"):
        embeddings = _embeddings(model, plan)
    memory.reserve_work()
    with memory.part("graphs"):
        forward = _forward(model, kv, target, sizes, options.attention_backend, states)
        capture_tower(model)
    encoder = _encoder(model, options, plan)
    grammars = Grammars(path, config.text.vocab_size)
    # Beside a GPU, PyTorch only copies a few kilobytes on the host. Splitting a copy over all cores takes
    # microseconds, or ten milliseconds while image decoding keeps them busy.
    on_close = OneTorchThread().end if plan.device.type == "cuda" else None
    return Runner(model, kv, encoder, grammars, forward, embeddings, memory.report(), on_close)


def eager_reason_of(model: VisionLanguageModel, device: torch.device) -> str | None:
    """Why a GPU runs the model without our kernels, for the start-up log."""
    reason = eager_reason(model.config) if device.type == "cuda" else None
    return f"steps run in plain PyTorch, without kernels and CUDA graphs: {reason}" if reason else None


def _states(config: ModelConfig, sizes: SchedulerConfig, plan: MemoryPlan) -> RecurrentStates | None:
    linear = config.text.linear
    if linear is None:
        return None
    return RecurrentStates(linear, sizes.max_num_seqs, sizes.state_rows or 0, plan.dtype, plan.device)


def _embeddings(model: VisionLanguageModel, plan: MemoryPlan) -> MutableMapping[Key, Tensor]:
    """A slab of device memory taken at start where our kernels run; a dict elsewhere."""
    if plan.device.type != "cuda" or eager_reason_of(model, plan.device):
        return {}
    slots = plan.scheduler.encoder_cache_slots
    width = costs.embedding_bytes_per_slot(model.config.text, "float32") // costs.dtype_bytes("float32")
    return EmbeddingSlab(slots, width, plan.dtype, plan.device)


def _encoder(model: VisionLanguageModel, options: Options, plan: MemoryPlan) -> LocalEncoder | None:
    vision = model.config.vision
    if vision is None:
        return None
    patches = costs.patches_of(plan.scheduler.encoder_budget, vision, model.config.text)
    if options.max_step_seconds(plan.device.type):
        patches = min(patches, _MAX_SLICED_PATCHES)
    threads = options.image_decode_threads or min(os.cpu_count() or 1, _MAX_DECODE_THREADS)
    return LocalEncoder(model, patches, threads, plan.device, plan.parts.images)


def _forward(
    model: VisionLanguageModel,
    kv: PagedKV,
    target: AttentionTarget,
    sizes: SchedulerConfig,
    backend: str,
    states: RecurrentStates | None,
) -> Forward:
    eager = eager_reason_of(model, target.device)
    if eager and backend == "flashinfer":
        raise ConfigError(f"attention_backend=flashinfer cannot be used: {eager}")
    if target.device.type != "cuda" or eager:
        return TorchForward(model, kv, sizes.block_size, states)
    from saccade.runner.cuda.forward import CudaForward  # needs Triton, which only CUDA machines have

    max_blocks = costs.blocks_for(sizes.max_model_len, sizes.block_size)
    forward = CudaForward(
        model.decoder,
        kv,
        block_size=sizes.block_size,
        max_requests=sizes.max_num_seqs,
        max_blocks=max_blocks,
        axes=3 if target.text.mrope_section else 1,
        flash=choose(backend, target, sizes.block_size, max_blocks, model.decoder.scale),
        states=states,
    )
    forward.capture(sizes.max_num_batched_tokens)
    return forward
