"""Puts a runner together: weights, KV blocks, encoder stage, grammars."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.config import ModelConfig, Options
from saccade.models import load_model
from saccade.models.attention import PagedKV
from saccade.runner.encoder import LocalEncoder
from saccade.runner.grammar import Grammars
from saccade.runner.memory import MemoryPlan
from saccade.runner.runner import Runner

_MOST_DECODE_THREADS = 8
_MOST_SLICED_PATCHES = 2048  # per pass when encoding is sliced: a slice is one layer over the whole pass


def build_runner(
    path: Path,
    config: ModelConfig,
    image_processor: Mapping[str, Any],
    options: Options,
    plan: MemoryPlan,
    *,
    progress: bool = True,
) -> Runner:
    model = load_model(
        path,
        config,
        dtype=plan.dtype,
        device=plan.device,
        load_format=options.load_format,
        seed=options.seed,
        progress=progress,
        image_processor=image_processor,
    )
    sizes = plan.scheduler
    kv = PagedKV.allocate(config.text, sizes.num_blocks, sizes.block_size, plan.dtype, plan.device)
    encoder = None
    if config.vision is not None:
        patches = sizes.encoder_budget * config.vision.spatial_merge_size**2
        if sizes.always_slice:
            patches = min(patches, _MOST_SLICED_PATCHES)
        threads = options.decode_threads or min(os.cpu_count() or 1, _MOST_DECODE_THREADS)
        encoder = LocalEncoder(model, patches, threads)
    grammars = Grammars(path / "tokenizer.json", config.text.vocab_size)
    return Runner(model, kv, encoder, grammars, sizes.block_size)
