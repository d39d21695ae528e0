"""Puts a runner together: weights, KV blocks, encoder stage, grammars."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import costs
from saccade.checkpoint.config import ModelConfig, TextConfig
from saccade.models import load_kv_scales
from saccade.models.interface import VisionLanguageModel
from saccade.models.layers.torch_attention import PagedKV
from saccade.options.engine import Options, SchedulerConfig
from saccade.runner.build_embedding_tiers import build_tiers
from saccade.runner.build_encoder import load, local_encoder, max_patches
from saccade.runner.cuda.compile_kernels import compile_kernels
from saccade.runner.cuda.kv_host_blocks import HostBlocks
from saccade.runner.device_memory import MemoryPlan
from saccade.runner.embedding_cache import EmbeddingSlab
from saccade.runner.embedding_tiers.entry import Namespace
from saccade.runner.encoder.encoder_channel import Connect
from saccade.runner.encoder.encoder_runner import LocalEncoder
from saccade.runner.encoder.graph_capture import capture_tower, run_tower
from saccade.runner.encoder.remote_encoders import RemoteEncoders
from saccade.runner.forward import Forward
from saccade.runner.forward_selector import ForwardParts, run_forward, select_forward
from saccade.runner.memory_report import MemoryReport
from saccade.runner.recurrent_state import RecurrentStates
from saccade.runner.runner import Runner
from saccade.runner.torch_threads import OneTorchThread
from saccade.runner.weight_packing import pack_where_faster
from saccade.structured.grammar import Grammars
from saccade.types.media import Geometry, Key

logger = logging.getLogger(__name__)

_REMOTE_IMAGES = 4  # of the largest size, that may be under way in one encoder worker
_MIN_ARENA_BYTES = 16 << 20


class EncoderLinks(NamedTuple):
    """How an engine reaches encoder workers."""

    addresses: tuple[str, ...]
    connect: Connect
    num_engines: int  # that share them


def build_runner(
    path: Path,
    config: ModelConfig,
    image_processor: Mapping[str, Any],
    options: Options,
    plan: MemoryPlan,
    largest: Geometry | None,
    *,
    progress: bool = True,
    links: EncoderLinks | None = None,
) -> Runner:
    memory = MemoryReport(plan)
    sizes = plan.scheduler
    if options.attention_backend == "flashinfer":
        logger.warning("attention_backend=flashinfer has no effect: prefill runs on Saccade's own kernels")
    if plan.device.type == "cuda":
        _claim(plan.device, options.gpu_memory_utilization)
    with memory.part("weights"):
        how = {"quantize": options.quantization, "max_model_len": sizes.max_model_len, "progress": progress}
        model = load(path, config, image_processor, options, plan, **how)
    with memory.part("kv"):
        kv = _new_kv(path, config, options, plan)
    with memory.part("staging"):
        host = HostBlocks(kv, sizes.block_size, sizes.host_blocks) if sizes.host_blocks else None
    with memory.part("states"):
        states = _states(model.config, sizes, plan)
    with memory.part("embeddings"):
        embeddings = _embeddings(model, plan)
    memory.reserve_work()
    with memory.part("graphs"):
        images = options.limit_mm_per_prompt.get("image", 0)
        parts = ForwardParts(model, kv, sizes, states, embeddings, max(1, images))
        forward, eager_reason = _captured(parts, plan.device)
    encoder = _encoder(model, options, plan, largest, links)
    pack_where_faster(model, plan.dtype, plan.device)  # after the encoder's tiers, which hash the weights
    # Beside a GPU, PyTorch only copies kilobytes on the host. Split over cores that decode they take 10 ms.
    on_close = OneTorchThread().end if plan.device.type == "cuda" else None
    grammars = Grammars(Path(options.tokenizer or path), config.text.vocab_size)
    reports = (memory.report(), on_close, eager_reason)
    return Runner(model, kv, encoder, grammars, forward, embeddings, *reports, host)


def _new_kv(path: Path, config: ModelConfig, options: Options, plan: MemoryPlan) -> PagedKV:
    has_scales = plan.kv_dtype != plan.dtype
    scales = load_kv_scales(path, config, options.load_format) if has_scales else ()
    shape = (config.text, plan.scheduler.num_blocks, plan.scheduler.block_size)
    return PagedKV.allocate(*shape, plan.kv_dtype, plan.device, scales)


def _captured(parts: ForwardParts, device: torch.device) -> tuple[Forward, str | None]:
    """As `select_forward`, with the tower captured, too."""
    model = parts.model
    compile_kernels(device, partial(run_forward, parts), partial(run_tower, model))
    forward, eager_reason = select_forward(parts)
    capture_tower(model)
    return forward, eager_reason


def _claim(device: torch.device, utilization: float) -> None:
    if device.index is not None:
        torch.cuda.set_device(device)  # kernels launch on the current device, not the tensors'
    # Other processes may use the rest, so the allocator enforces it.
    torch.cuda.set_per_process_memory_fraction(utilization, device.index)


def _states(config: ModelConfig, sizes: SchedulerConfig, plan: MemoryPlan) -> RecurrentStates | None:
    linear = config.text.linear
    if linear is None:
        return None
    return RecurrentStates(linear, sizes.max_num_seqs, sizes.state_rows or 0, plan.dtype, plan.device)


def _embeddings(model: VisionLanguageModel, plan: MemoryPlan) -> MutableMapping[Key, Tensor]:
    """A slab of device memory taken at start; a dict on a CPU."""
    if plan.device.type != "cuda":
        return {}
    return new_slab(model.config.text, plan.scheduler.encoder_cache_slots, plan.dtype, plan.device)


def new_slab(text: TextConfig, slots: int, dtype: torch.dtype, device: torch.device) -> EmbeddingSlab:
    width = costs.embedding_bytes_per_slot(text, "float32") // costs.dtype_bytes("float32")
    return EmbeddingSlab(slots, width, dtype, device, max(1, costs.cross_slots_per_state(text)))


def _encoder(
    model: VisionLanguageModel,
    options: Options,
    plan: MemoryPlan,
    largest: Geometry | None,
    links: EncoderLinks | None,
) -> LocalEncoder | None:
    vision = model.config.vision
    if vision is None:
        return None
    budget = plan.scheduler.encoder_budget
    patches = max_patches(options, model.config, budget, plan.device)
    tiers = build_tiers(model, options, plan, largest)
    build = partial(local_encoder, model, options, patches, plan.device, plan.parts.images, tiers)
    if links is None or largest is None:
        return build()
    # On a GPU embeddings that arrive take device memory, which is planned for two passes.
    ahead = 2 * costs.patches_of(budget, vision, model.config.text)
    if plan.device.type != "cuda":
        ahead *= len(links.addresses)
    return build(_remote(model.config.text, plan, largest, links), ahead)


def _remote(text: TextConfig, plan: MemoryPlan, largest: Geometry, links: EncoderLinks) -> RemoteEncoders:
    form = Namespace(text.embedding_size, str(plan.dtype).removeprefix("torch."), b"")
    arena = max(_REMOTE_IMAGES * largest.slots * plan.scheduler.slot_bytes, _MIN_ARENA_BYTES)
    return RemoteEncoders(links.addresses, links.connect, form, arena, links.num_engines)
