"""LLaVA-1.5: every image is resized by its short side and cropped to one square; sequential positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from saccade.errors import ConfigError
from saccade.processor.families import base
from saccade.processor.families.base import Expansion, Files, Positions, TokenIds
from saccade.types.media import Geometry, Grid, Size
from saccade.types.prompt import Span

_DEFAULT_SIDE = 224  # what CLIP's image processor assumes when a checkpoint is silent


@dataclass(frozen=True, slots=True)
class Llava:
    short_side: int | None  # after the resize; None: stretched to the crop
    crop: Size
    patch_size: int
    extra_tokens: int  # beside the patches: 1 for a class token that is kept
    image_token_id: int
    settings: Mapping[str, Any]
    is_fixed_size: bool = True

    @classmethod
    def from_checkpoint(cls, files: Files) -> Self:
        vision, token = base.vision_and_token(files)
        given = files.image_processor
        processor = files.processor
        if given.get("do_pad"):
            message = "the image processor says do_pad=true, but pictures are cropped here, not padded"
            raise ConfigError(message)
        short_side, crop = _resize_and_crop(given)
        base.check_agreement("processor_config.json", processor, {"patch_size": vision.patch_size})
        if vision.image_size is not None and set(crop) != {vision.image_size}:
            size = f"{crop.width}x{crop.height}"
            made = f"the image processor's crop_size (or size) makes {size} pixels of a picture"
            raise ConfigError(f"{made}, but the vision tower takes image_size={vision.image_size}")
        return cls(
            short_side=short_side,
            crop=crop,
            patch_size=vision.patch_size,
            extra_tokens=_extra_tokens(processor, files.config.raw),
            image_token_id=token,
            settings=base.pixel_settings(given),
        )

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        return (self.image_token_id,)

    def policy(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        """The tower takes one size only; limits are ignored."""
        pixels = self.crop.width * self.crop.height
        return pixels, pixels

    def policy_tag(self, min_pixels: int, max_pixels: int) -> bytes:
        sides = {"short_side": self.short_side, "crop": self.crop, "patch": self.patch_size}
        return base.tag({**self.settings, **sides})

    def geometry(self, size: Size, min_pixels: int, max_pixels: int) -> Geometry:
        base.check_aspect_ratio(size)
        return self._of(self._resized(size))

    def largest(self, min_pixels: int, max_pixels: int) -> Geometry:
        return self._of(self.crop)

    def _resized(self, size: Size) -> Size:
        if self.short_side is None:
            return self.crop
        longer = int(self.short_side * max(size) / min(size))  # truncated, not rounded
        return Size(self.short_side, longer) if size.width <= size.height else Size(longer, self.short_side)

    def _of(self, resized: Size) -> Geometry:
        grid = Grid(1, self.crop.height // self.patch_size, self.crop.width // self.patch_size)
        tokens = grid.patches + self.extra_tokens
        return Geometry(resized, grid, tokens, tokens)

    def expand(self, geometry: Geometry) -> Expansion:
        return Expansion(np.full(geometry.tokens, self.image_token_id, np.int64), None)

    def positions(self, token_ids: TokenIds, spans: Sequence[Span], grids: Sequence[Grid]) -> Positions:
        return base.sequential_positions(token_ids)


def _resize_and_crop(given: Mapping[str, Any]) -> tuple[int | None, Size]:
    """`size` and `crop_size` are integers in old checkpoints, mappings in newer ones."""
    size = {"shortest_edge": _DEFAULT_SIDE} if given.get("size") is None else given["size"]
    short_side = size if isinstance(size, int) else size.get("shortest_edge")
    own = _DEFAULT_SIDE if given.get("crop_size") is None else given["crop_size"]
    crop = own if given.get("do_center_crop", _crops(given, size)) else size
    if not given.get("do_resize", True):
        message = "the image processor says do_resize=false; the vision tower takes pictures of one size only"
        raise ConfigError(message)
    if isinstance(crop, int):
        crop = {"height": crop, "width": crop}
    if not crop.get("height") or not crop.get("width"):
        found = f"size={size}, crop_size={own}"
        raise ConfigError(f"the image processor neither crops nor resizes to one height and width ({found})")
    return short_side, Size(crop["width"], crop["height"])


def _crops(given: Mapping[str, Any], size: Mapping[str, Any] | int) -> bool:
    """Whether a processor without do_center_crop crops. SigLIP's does not: it resizes to height and width."""
    return given.get("crop_size") is not None or isinstance(size, int) or not size.get("height")


def _extra_tokens(processor: Mapping[str, Any], raw: Mapping[str, Any]) -> int:
    """Tokens beside one per patch. CLIP adds a class token, SigLIP has none; the strategy "default" drops it.

    A processor without patch_size does not count it, so the tower's own output decides.
    """
    name = "vision_feature_select_strategy"
    in_config = raw.get(name)
    strategy = processor.get(name) or in_config or "default"
    if strategy not in ("default", "full") or in_config not in (None, strategy):
        found = f"{strategy!r} in processor_config.json and {in_config!r} in config.json"
        raise ConfigError(f"{name} must be default or full in both files, not {found}")
    own = 0 if (raw.get("vision_config") or {}).get("model_type") == "siglip_vision_model" else 1
    added = processor.get("num_additional_image_tokens") if processor.get("patch_size") else own
    dropped = 1 if strategy == "default" else 0
    extra = (own if added is None else int(added)) - dropped
    if extra < 0:
        reason = f"processor_config.json counts {added} extra image tokens but drops {dropped}"
        raise ConfigError(f"{reason}; set num_additional_image_tokens to 1, the tower's class token")
    return extra
