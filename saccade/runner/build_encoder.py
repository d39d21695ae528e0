"""An encoder worker's part of a model: its memory, and the encoder stage over the vision tower alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from saccade import costs
from saccade.checkpoint.config import ModelConfig
from saccade.errors import ConfigError
from saccade.models import is_native, load_model
from saccade.models.interface import VisionLanguageModel
from saccade.options.engine import Options
from saccade.runner.cuda.compile_kernels import compile_kernels
from saccade.runner.device_memory import MemoryPlan, check_gpu_jpeg, device_of, dtype_of
from saccade.runner.embedding_tiers.tiers import EmbeddingTiers
from saccade.runner.encoder.encoder_runner import LocalEncoder
from saccade.runner.encoder.gpu_jpeg import build_gpu_jpegs
from saccade.runner.encoder.graph_capture import capture_tower, run_tower
from saccade.runner.encoder.remote_encoders import RemoteEncoders
from saccade.runner.latency_profile import encode_seconds, largest_within
from saccade.runner.memory import (
    SPARE_BYTES,
    budget_of,
    image_bytes,
    jpeg_bytes,
    pass_patches,
    tower_graph_bytes,
)
from saccade.runner.replica_placement import decode_threads
from saccade.runner.weight_packing import pack_where_faster
from saccade.types.media import Geometry

MAX_CPU_PATCHES = 2048  # per pass: more gain nothing in GEMMs, cost memory, and lengthen a slice of a layer
_MEASURED_PATCHES = 1024


class EncoderPlan(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    max_patches: int  # in a pass
    upload_bytes: int  # of the device, for images before the tower
    total_bytes: int  # of the device
    is_whole: bool  # encoding reads weights of the decoder, so all are loaded


def plan_encoder(options: Options, model: ModelConfig, largest: Geometry | None) -> EncoderPlan:
    if model.vision is None or largest is None:
        raise ConfigError("encoders > 0, but the model or its limits allow no pictures; leave out --encoders")
    device = device_of(options.device)
    check_gpu_jpeg(options, device)
    dtype, _ = dtype_of(options.dtype, model.dtype, device)
    is_whole = not is_native(model) or bool(model.text.num_cross_layers)
    weights = costs.encoder_params(model.vision, model.text) * costs.dtype_bytes(dtype)
    patches = pass_patches(options, model, largest)
    images = image_bytes(options, model, dtype, largest, restores=False)
    work = patches * costs.encode_bytes_per_patch(model.vision, model.text, dtype)
    total = costs.weight_bytes(model, dtype) if is_whole else weights
    total += images + jpeg_bytes(options, model) + work + tower_graph_bytes(model, dtype) + SPARE_BYTES
    budget = budget_of(options, largest.slots)
    return EncoderPlan(
        device,
        getattr(torch, dtype),
        max_patches(options, model, budget, device),
        images if device.type == "cuda" else 0,
        total,
        is_whole,
    )


def max_patches(options: Options, model: ModelConfig, budget: int, device: torch.device) -> int:
    """That go through the tower together. `budget`: embeddings encoded per step."""
    assert model.vision is not None
    patches = costs.patches_of(budget, model.vision, model.text)
    if device.type == "cpu":
        return min(patches, MAX_CPU_PATCHES)
    return patches


def load(
    path: Path,
    config: ModelConfig,
    image_processor: Mapping[str, Any],
    options: Options,
    plan: EncoderPlan | MemoryPlan,
    **how: Any,
) -> VisionLanguageModel:
    return load_model(
        path,
        config,
        dtype=plan.dtype,
        device=plan.device,
        load_format=options.load_format,
        seed=options.seed,
        image_processor=image_processor,
        **how,
    )


def local_encoder(
    model: VisionLanguageModel,
    options: Options,
    max_patches: int,
    device: torch.device,
    upload_bytes: int,
    tiers: EmbeddingTiers | None = None,
    remote: RemoteEncoders | None = None,
    max_ahead: int | None = None,
) -> LocalEncoder:
    return LocalEncoder(
        model,
        max_patches,
        decode_threads(options),
        device,
        upload_bytes,
        tiers,
        remote,
        max_ahead,
        jpegs=build_gpu_jpegs(device) if options.gpu_jpeg else None,
        isolated=options.isolate_decoders == "on",
        max_decode_seconds=options.max_decode_seconds,
    )


def build_encoder(
    path: Path,
    config: ModelConfig,
    image_processor: Mapping[str, Any],
    options: Options,
    plan: EncoderPlan,
    largest: Geometry,
    *,
    progress: bool = True,
) -> tuple[LocalEncoder, float]:
    """The stage, warm, and the seconds that a patch takes it."""
    if plan.device.type == "cuda":
        torch.set_num_threads(1)  # beside a GPU it only copies, and decoding threads need the cores
    if plan.device.index is not None:
        torch.cuda.set_device(plan.device)  # kernels launch on the current device, not the tensors'
    model = load(path, config, image_processor, options, plan, progress=progress, is_encoder=True)
    compile_kernels(plan.device, partial(run_tower, model))
    capture_tower(model)
    pack_where_faster(model, plan.dtype, plan.device)
    encoder = local_encoder(model, options, plan.max_patches, plan.device, plan.upload_bytes)
    assert config.vision is not None
    encoder.warm_up(largest, config.vision.temporal_patch_size)
    grid = largest_within(config, largest.grid, min(plan.max_patches, _MEASURED_PATCHES))
    return encoder, encode_seconds(model, grid) / grid.patches
