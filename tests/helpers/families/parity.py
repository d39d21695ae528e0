"""A checkpoint in Saccade without its engine, beside Transformers on the same folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
)

from saccade.checkpoint.config import model_config
from saccade.models import load_model
from saccade.models.interface import VisionLanguageModel
from saccade.models.layers.forward_types import Encoding
from saccade.models.layers.torch_attention import AttentionBatch, PagedAttention, PagedKV
from saccade.runner.recurrent_state import RecurrentStates
from saccade.types.media import Geometry, Grid, Size
from saccade.types.step import ScheduledWindow

BLOCK = 4
CPU = torch.device("cpu")


class Pair:
    """The same checkpoint in Saccade and in Transformers."""

    def __init__(self, folder: Path, **kwargs: Any) -> None:
        raw = json.loads((folder / "config.json").read_text())
        self.config = model_config(raw)
        self.ours: VisionLanguageModel = load_model(
            folder, self.config, dtype=torch.float32, device=CPU, progress=False, **kwargs
        )
        self.theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    def geometry(self, grid: Grid) -> Geometry:
        vision = self.config.vision
        assert vision is not None
        side = vision.patch_size
        slots = grid.patches // vision.spatial_merge_size**2
        return Geometry(Size(grid.w * side, grid.h * side), grid, slots, slots)

    def images(self, count: int) -> list[tuple[Grid, Tensor]]:
        """Random images as (grid, patches); LLaVA takes one size only."""
        grids = [Grid(1, 4, 4)] * count if self.config.model_type == "llava" else [Grid(1, 4, 6), Grid(1, 6, 2)][:count]
        rng = np.random.default_rng(0)
        made = []
        for grid in grids:
            geometry = self.geometry(grid)
            image = rng.integers(0, 256, (geometry.resized.height, geometry.resized.width, 3), dtype=np.uint8)
            made.append((grid, self.ours.prepare(image, geometry)))
        return made


def finish(encoding: Encoding) -> list[Tensor]:
    while True:
        try:
            next(encoding)
        except StopIteration as done:
            embeddings: list[Tensor] = done.value
            return embeddings


def pixel_arguments(pair: Pair, images: Sequence[tuple[Grid, Tensor]]) -> dict[str, Tensor]:
    if not images:
        return {}
    patches = torch.cat([p for _, p in images])
    if pair.config.model_type.startswith("qwen"):
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([g for g, _ in images])}
    pixels = patches.view(len(images), 4, 4, 3, 14, 14).permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, 56, 56)
    return {"pixel_values": pixels}


def their_logits(pair: Pair, ids: Tensor, images: Sequence[tuple[Grid, Tensor]]) -> Tensor:
    arguments: dict[str, Any] = pixel_arguments(pair, images)
    if pair.config.model_type.startswith("qwen"):
        arguments["mm_token_type_ids"] = torch.eq(ids, pair.config.image_token_id or 0).int()[None]
    with torch.no_grad():
        logits: Tensor = pair.theirs(input_ids=ids[None], **arguments).logits[0]
    return logits


def positions_of(pair: Pair, ids: Tensor, images: Sequence[tuple[Grid, Tensor]]) -> Tensor:
    plain = torch.arange(len(ids))
    if pair.config.model_type == "llava":
        return plain[None]
    if not images:
        return plain.expand(3, -1)
    grids = torch.tensor([g for g, _ in images])
    kinds = torch.eq(ids, pair.config.image_token_id or 0).int()[None]
    positions, _ = pair.theirs.model.get_rope_index(ids[None], kinds, image_grid_thw=grids)
    found: Tensor = positions[:, 0]
    return found


def one_request(context: int, new: int, seed: int = 0) -> AttentionBatch:
    """A single request whose last `new` tokens are computed, its blocks scattered over the cache."""
    blocks = torch.randperm(64, generator=torch.Generator().manual_seed(seed))[: -(-context // BLOCK)]
    places = torch.arange(context - new, context)
    return AttentionBatch([new], [context], blocks[None], blocks[places // BLOCK] * BLOCK + places % BLOCK, BLOCK)


@torch.inference_mode()
def our_logits(pair: Pair, ids: Tensor, images: Sequence[tuple[Grid, Tensor]], chunk: int | None = None) -> Tensor:
    model, text = pair.ours, pair.config.text
    embeds = model.embed(ids)
    if images:
        encoded = finish(model.encode(torch.cat([p for _, p in images]), [g for g, _ in images]))
        embeds[ids == pair.config.image_token_id] = torch.cat(encoded)
    positions = positions_of(pair, ids, images)
    kv = PagedKV.allocate(text, 64, BLOCK, torch.float32, CPU)
    outputs = []
    step = chunk or len(ids)
    for start in range(0, len(ids), step):
        end = min(start + step, len(ids))
        attention = PagedAttention(kv, one_request(end, end - start), text.head_dim**-0.5)
        outputs.append(model.logits(model.forward(embeds[start:end], positions[:, start:end], attention)))
    return torch.cat(outputs)


def prompt(pair: Pair, images: Sequence[tuple[Grid, Tensor]]) -> Tensor:
    """Text, then each picture followed by more text."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 200, (7,), generator=generator).tolist()
    for grid, _ in images:
        ids += [pair.config.image_token_id] * pair.geometry(grid).slots
        ids += torch.randint(3, 200, (5,), generator=generator).tolist()
    return torch.tensor(ids)


def assert_close(ours: Tensor, theirs: Tensor, relative: float = 1e-4) -> None:
    difference = (ours - theirs).abs().max() / theirs.abs().max()
    assert difference < relative, f"relative difference {difference:.2e}"


@torch.inference_mode()
def hybrid_logits(pair: Pair, ids: Tensor, images: list[tuple[Grid, Tensor]], chunk: int) -> Tensor:
    """As `our_logits`, for a model with recurrent layers: states follow the request."""
    model, text = pair.ours, pair.config.text
    assert text.linear is not None
    embeds = model.embed(ids)
    if images:
        encoded = finish(model.encode(torch.cat([p for _, p in images]), [g for g, _ in images]))
        embeds[ids == pair.config.image_token_id] = torch.cat(encoded)
    positions, outputs = positions_of(pair, ids, images), []
    kv, states = (
        PagedKV.allocate(text, 64, BLOCK, torch.float32, CPU),
        RecurrentStates(text.linear, 3, 0, torch.float32, CPU),
    )
    states.open("other")
    states.open("a")
    for start in range(0, len(ids), chunk):
        end = min(start + chunk, len(ids))
        attention = PagedAttention(kv, one_request(end, end - start), model.decoder.scale)
        now = states.of([ScheduledWindow("a", start, end, (), False)])
        hidden = model.forward(embeds[start:end], positions[:, start:end], attention, now)  # type: ignore[call-arg]
        outputs.append(model.logits(hidden))
    return torch.cat(outputs)
