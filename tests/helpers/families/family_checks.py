"""What the tests of single families share: a checkpoint in Saccade without its engine, and settings to try."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from saccade.checkpoint.config import ModelConfig, model_config
from saccade.models import load_model
from saccade.models.interface import EncodesBySize, Tiled
from saccade.models.layers.torch_attention import AttentionBatch, PagedAttention, PagedKV
from saccade.options.engine import MediaPolicy, Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.input_processor import Processor
from saccade.runner.cross_attention_metadata import rows_by_image
from saccade.runner.recurrent_state import RecurrentStates
from saccade.types.media import Geometry, Size
from saccade.types.step import ScheduledWindow

POLICY = MediaPolicy.of(Options(limit_mm_per_prompt={"image": 4}, max_image_bytes=1 << 24, max_image_pixels=10_000_000))
CPU = torch.device("cpu")


@dataclass
class Given:
    """The part of a checkpoint that a family reads, with settings of one's own."""

    config: ModelConfig
    image_processor: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    video_processor: dict[str, Any] = field(default_factory=dict)
    path: Path = Path("no-such-folder")


class Subject:
    """A checkpoint's rules and model, called directly."""

    def __init__(self, folder: Path) -> None:
        checkpoint = open_checkpoint(str(folder))
        self.config = checkpoint.config
        self.processor = Processor(checkpoint, POLICY)
        self.family = self.processor.family
        self.model: Any = load_model(
            folder,
            self.config,
            dtype=torch.float32,
            device=CPU,
            progress=False,
            image_processor=checkpoint.image_processor,
        )

    def geometry(self, image: Image.Image) -> Geometry:
        return self.family.geometry(Size(*image.size), *self.family.policy(None, None))

    def prepare(self, image: Image.Image) -> torch.Tensor:
        prepared: torch.Tensor = self.model.prepare(np.asarray(image.convert("RGB")), self.geometry(image))
        return prepared

    @torch.inference_mode()
    def embeddings(self, images: list[Image.Image]) -> list[torch.Tensor]:
        """All pictures in one pass."""
        geometries = [self.geometry(image) for image in images]
        patches = torch.cat([self.prepare(image) for image in images])
        if isinstance(self.model, EncodesBySize):
            return finish(self.model.encode_images(patches, geometries))
        features = finish(self.model.encode(patches, [geometry.grid for geometry in geometries]))
        if isinstance(self.model, Tiled):
            return [self.model.join(one, geometry) for one, geometry in zip(features, geometries, strict=True)]
        return features

    @torch.inference_mode()
    def logits(self, text: str, images: list[Image.Image], chunk: int | None = None) -> torch.Tensor:  # [tokens, V]
        """Of a whole prompt, computed in windows of so many tokens."""
        prompt = self.processor.from_prompt({"prompt": text, "multi_modal_data": {"image": images}})
        length = len(prompt)
        embeds = self.model.embed(torch.tensor(prompt.token_ids))
        for span, rows in zip(prompt.spans, self.embeddings(images) if images else [], strict=True):
            takes = torch.tensor(span.is_embed or [True] * span.length)
            embeds[span.start : span.end][takes] = rows
        positions = torch.from_numpy(prompt.positions)
        kv = PagedKV.allocate(self.config.text, length + 1, 1, torch.float32, CPU)
        slots = torch.randperm(length, generator=torch.Generator().manual_seed(0))  # scattered over the cache
        states = RecurrentStates(self.config.text.linear, 1, 0, torch.float32, CPU) if self.config.text.linear else None
        if states:
            states.open("a")
        outputs = []
        for start in range(0, length, chunk or length):
            end = min(start + (chunk or length), length)
            batch = AttentionBatch([end - start], [end], slots[None, :end], slots[start:end], 1)
            attention = PagedAttention(kv, batch, self.model.decoder.scale)
            more = [states.of([ScheduledWindow("a", start, end, (), False)])] if states else []
            hidden = self.model.forward(embeds[start:end], positions[:, start:end], attention, *more)
            outputs.append(self.model.logits(hidden))
        return torch.cat(outputs)


class CrossAttentionSubject(Subject):
    """A model that reads images by cross-attention: told which rows read which image, as by the runner."""

    @torch.inference_mode()
    def logits(self, text: str, images: list[Image.Image], chunk: int | None = None) -> torch.Tensor:  # [tokens, V]
        prompt = self.processor.from_prompt({"prompt": text, "multi_modal_data": {"image": images}})
        found = self.embeddings(images) if images else []
        by_key = {span.key: rows for span, rows in zip(prompt.spans, found, strict=True)}
        length, slots = len(prompt), torch.arange(len(prompt))
        kv = PagedKV.allocate(self.config.text, length + 1, 1, torch.float32, CPU)
        embeds = self.model.embed(torch.tensor(prompt.token_ids))
        positions = torch.from_numpy(prompt.positions)
        outputs = []
        for start in range(0, length, chunk or length):
            end = min(start + (chunk or length), length)
            batch = AttentionBatch([end - start], [end], slots[None, :end], slots[start:end], 1)
            attention = PagedAttention(kv, batch, self.config.text.head_dim**-0.5)
            rows = rows_by_image([(ScheduledWindow("a", start, end, (), True), prompt.spans)], by_key, CPU)
            hidden = self.model.forward(embeds[start:end], positions[:, start:end], attention, rows)
            outputs.append(self.model.logits(hidden))
        return torch.cat(outputs)


def finish(encoding: Any) -> list[torch.Tensor]:
    """All layers of an encoding, and what it returns."""
    while True:
        try:
            next(encoding)
        except StopIteration as done:
            return list(done.value)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, relative: float = 1e-4) -> None:
    assert ours.shape == theirs.shape
    difference = (ours - theirs).abs().max() / theirs.abs().max()
    assert difference < relative, f"relative difference {difference:.2e}"


def as_patches(squares: torch.Tensor, patch: int) -> torch.Tensor:
    """Pixels of equal squares or one picture [n, 3, H, W] -> [n * patches, 3 * patch * patch], as towers cut them."""
    n, channels, height, width = squares.shape
    rows, columns = height // patch, width // patch
    cut = squares[:, :, : rows * patch, : columns * patch].reshape(n, channels, rows, patch, columns, patch)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(n * rows * columns, -1)


def edited(folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """The folder with another config.json."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))
    return folder


def dummy(raw: dict[str, Any], **changes: Any) -> Any:
    """A model with random weights from a config.json with changes; a mapping changes the fields it names."""
    merged = {**raw, **{k: {**raw[k], **v} if isinstance(v, dict) else v for k, v in changes.items()}}
    return load_model(None, model_config(merged), dtype=torch.float32, device=CPU, load_format="dummy")


def with_config(config: ModelConfig, **raw: Any) -> ModelConfig:
    return replace(config, raw={**config.raw, **raw})
