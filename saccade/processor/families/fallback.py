"""Any other family, through Transformers' own processor: count tokens and tiles of a blank image."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
from PIL import Image

from saccade.checkpoint import hf_processor
from saccade.errors import RequestError
from saccade.processor.families import base
from saccade.processor.families.base import Expansion, Files, Positions, TokenIds
from saccade.types.media import Geometry, Grid, Size
from saccade.types.prompt import Span

MAX_PIXELS = 25_000_000
"""Counting allocates a blank image of the same size, so sizes have a bound of their own."""
_ORDINARY = Size(512, 384)
_RATIOS = (1, 5 / 4, 4 / 3, 3 / 2, 16 / 9, 2, 5 / 2, 3, 4, 5, 6, 8)
_WIDE = [Size(1280, round(1280 / ratio)) for ratio in _RATIOS]
_TALL = [Size(height, width) for width, height in _WIDE]
_TRIED = [*_WIDE, *_TALL, Size(64, 64), Size(512, 512), Size(2048, 2048)]


class Counted(NamedTuple):
    token_ids: tuple[int, ...]  # of the expanded image
    tiles: int
    tile: Size  # input of the tower, in pixels


@dataclass(frozen=True, slots=True)
class Fallback:
    image_token_id: int  # placeholder in the prompt before expansion
    embedded_id: int  # tokens that embeddings replace, after expansion
    patch_size: int
    count: Callable[[Size], Counted]
    settings: str  # of the image processor
    rope_switch: int | None = None  # see TextConfig
    is_fixed_size: bool = True  # the processor applies pixel limits of its own

    @classmethod
    def from_checkpoint(cls, files: Files) -> Self:
        config = files.config
        kind = config.model_type
        embedded = config.image_token_id
        if config.vision is None or embedded is None:
            raise hf_processor.refusal(kind, "config.json has no vision_config or no image_token_id")
        processor = hf_processor.load_processor(files.path, kind)
        token = hf_processor.placeholder(processor, kind, embedded)
        hf_processor.check_inputs(processor, files.path, kind, token)
        count = lru_cache(4096)(lambda size: _count(processor, token, size))
        token_id = processor.tokenizer.convert_tokens_to_ids(token)
        settings = repr(processor.image_processor)
        try:
            count(_ORDINARY)
        except Exception as error:
            size = f"{_ORDINARY.width}x{_ORDINARY.height}"
            reason = f"its processor fails on a picture of {size} pixels: {hf_processor.raised(error)}"
            raise hf_processor.refusal(kind, reason) from error
        return cls(token_id, embedded, config.vision.patch_size, count, settings, config.text.rope_switch)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        return tuple({self.image_token_id, self.embedded_id})

    def policy(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        return 1, MAX_PIXELS

    def policy_tag(self, min_pixels: int, max_pixels: int) -> bytes:
        return base.tag({"processor": self.settings})

    def geometry(self, size: Size, min_pixels: int, max_pixels: int) -> Geometry:
        base.check_aspect_ratio(size)
        if size.width * size.height > MAX_PIXELS:
            pixels = f"the picture is {size.width}x{size.height} pixels, and at most {MAX_PIXELS} are allowed"
            message = f"{pixels} for a model that is served through Transformers"
            raise RequestError(message, code="image_too_large")
        counted = self._counted(size)
        rows = counted.tile.height // self.patch_size
        columns = counted.tile.width // self.patch_size
        slots = counted.token_ids.count(self.embedded_id)
        return Geometry(size, Grid(counted.tiles, rows, columns), len(counted.token_ids), slots)

    def _counted(self, size: Size) -> Counted:
        try:
            return self.count(size)
        except Exception:  # a processor may raise anything about an image
            message = f"the model's own processor takes no pictures of {size.width}x{size.height} pixels"
            raise RequestError(message, code="invalid_image") from None

    def largest(self, min_pixels: int, max_pixels: int) -> Geometry:
        """The largest of many sizes tried. An image that costs still more is refused when it comes."""
        geometries = []
        for size in (_ORDINARY, *_TRIED):
            with suppress(RequestError):  # a size that the processor does not take
                geometries.append(self.geometry(size, min_pixels, max_pixels))
        return max(geometries, key=lambda geometry: geometry.slots)

    def expand(self, geometry: Geometry) -> Expansion:
        ids = self.count(geometry.resized).token_ids  # here `resized` is the image's own size
        return Expansion(np.array(ids, np.int64), tuple(i == self.embedded_id for i in ids))

    def positions(self, token_ids: TokenIds, spans: Sequence[Span], grids: Sequence[Grid]) -> Positions:
        """LongRoPE needs a second row: the last position of the token's prompt, which selects the factors."""
        positions, next_position = base.sequential_positions(self, token_ids, spans, grids)
        if self.rope_switch is None:
            return positions, next_position
        return np.concatenate([positions, np.full_like(positions, next_position - 1)]), next_position

    def root(self, salt: bytes, tokens: int) -> bytes:
        """Prompts below and above the LongRoPE switch share no prefix."""
        if self.rope_switch is None or tokens <= self.rope_switch:
            return salt
        return hashlib.sha256(b"long" + salt).digest()


def _count(processor: Any, token: str, size: Size) -> Counted:
    inputs = hf_processor.processed(processor, token, Image.new("RGB", size))
    *tiles, _, height, width = inputs["pixel_values"].shape
    return Counted(tuple(inputs["input_ids"][0].tolist()), math.prod(tiles), Size(width, height))
